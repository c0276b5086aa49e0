"""The rows to export, with the corrections beside them and, where asked for, their images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from jobs.corrections import Correction, RowKey, key_of, latest_corrections
from jobs.export.filters import Filters
from jobs.joining import NO_FIELDS, Join, Pair, joined_rows
from jobs.results import Output
from jobs.rows import rows_of
from pipeline.errors import RequestError
from pipeline.input.reader import ReaderSettings
from pipeline.records import Row, Sample, Shard

CORRECTED_COLUMNS = ("corrected_caption", "corrected_by", "corrected_at")


@dataclass(frozen=True, slots=True)
class ExportRow:
    """A row, and what a person made of its caption."""

    row: Row
    correction: Correction | None = None

    @property
    def caption(self) -> str:
        """The caption that counts: a person's, if there is one."""
        return self.correction.corrected_caption if self.correction else self.row.caption or ""


@dataclass(frozen=True, slots=True)
class Source:
    """What an export takes its rows from; every pass yields the same ones."""

    output: Output
    filters: Filters
    join: Join | None = None  # None: no shards were named
    uses_corrections: bool = True
    corrections: dict[RowKey, Correction] = field(default_factory=dict)

    @classmethod
    def of(
        cls, output: Output, filters: Filters, join: Join | None, *, uses_corrections: bool
    ) -> Source:
        """Read the corrections; RequestError if a filter does not fit the columns."""
        filters.apply(output.schema.arrow().empty_table())
        corrections = latest_corrections(output.folder) if uses_corrections else {}
        return cls(output, filters, join, uses_corrections, corrections)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the wanted rows of each finished shard, corrections as columns."""
        if self.join is None:
            for result in self.output.done:
                yield self._corrected(self.filters.apply(result.table()))
            return
        for pair in self._pairs:
            table = self.filters.apply(pair.result.table())
            for _ in joined_rows(pair, rows_of(table)):
                pass  # the join is what is wanted here: it raises where it does not hold
            yield self._corrected(table)

    def rows(self) -> Iterator[ExportRow]:
        """Yield the wanted rows, their join checked first if there are shards."""
        for table in self.tables():
            for row in rows_of(table.select(self.output.schema.arrow().names)):
                yield ExportRow(row, self.corrections.get(key_of(row)))

    def images(
        self, settings: ReaderSettings = NO_FIELDS
    ) -> Iterator[tuple[Shard, Iterator[tuple[Sample, list[ExportRow]]]]]:
        """Yield each shard with its images and their wanted rows, in order, the join checked."""
        for pair in self._pairs:
            table = self.filters.apply(pair.result.table())
            if table.num_rows:
                yield (
                    pair.shard,
                    (
                        (
                            sample,
                            [ExportRow(row, self.corrections.get(key_of(row))) for row in rows],
                        )
                        for sample, rows in joined_rows(pair, rows_of(table), settings)
                    ),
                )

    @property
    def schema(self) -> pa.Schema:
        """The columns of `tables`."""
        schema = self.output.schema.arrow()
        for name in CORRECTED_COLUMNS if self.corrections else ():
            schema = schema.append(pa.field(name, pa.string()))
        return schema

    @property
    def _pairs(self) -> list[Pair]:
        if self.join is None:
            raise RequestError("this format needs the pictures; name their --shards")
        return [pair for pair in self.join.pairs if pair.result.is_done]

    def _corrected(self, table: pa.Table) -> pa.Table:
        if not self.corrections:
            return table
        numbers = (
            table.column("caption_index").to_pylist()
            if "caption_index" in table.column_names
            else [0] * table.num_rows
        )
        keys = zip(
            table.column("shard").to_pylist(),
            table.column("index").to_pylist(),
            numbers,
            strict=True,
        )
        found = [self.corrections.get(key) for key in keys]
        for name in CORRECTED_COLUMNS:
            values = [None if one is None else getattr(one, name) for one in found]
            table = table.append_column(pa.field(name, pa.string()), pa.array(values, pa.string()))
        return table
