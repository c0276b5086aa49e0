"""A Parquet file to samples: each row is one, in order, whatever its image column holds.

    image: {bytes, path}   title: text   label: class        ──►  Sample(data, {title, label, json})
    {bytes: ..., path: cat.jpg}  "A cat"   0                      key 00000000, member cat.jpg

A file is whole if its footer is there, which is written last, and each row that the footer
promises can be read; pages with a checksum are held against it. Rows come in small batches, page
by page, so that a row group of gigabytes takes no more memory than its largest page. A path in a
row is a name and nothing more: no file is opened for it.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import SampleError, ShardError
from pipeline.images.formats import extension_for, sniff
from pipeline.input.columns import JSON_FIELD, Layout, check_fields, layout_of
from pipeline.input.counted import CountedFile
from pipeline.input.reader import ReaderSettings, ShardStats
from pipeline.input.shards import open_shard
from pipeline.input.values import field_bytes, json_text, values_of
from pipeline.records import Sample, SampleRef, Shard

MAGIC = b"PAR1"
PAGE_BYTES = 1 << 20  # read at a time of each column
BATCH_BYTES = 8 << 20  # of a batch of rows, as far as the mean of its row group tells
MAX_BATCH_ROWS = 256
KEY_DIGITS = 8


def read_table(
    shard: Shard, settings: ReaderSettings, skip: Container[int], stats: ShardStats
) -> Iterator[Sample]:
    """Yield a Parquet file's rows as samples, all but those whose number is in `skip`.

    Row groups that are skipped as a whole are not read. Raises ShardError, after every row that
    came whole before it, if the file is damaged, and ColumnError if its columns do not fit.
    """
    with open_shard(shard) as raw, _open(raw, shard, stats) as parquet:
        layout = layout_of(parquet.schema_arrow, shard.columns, settings.fields, shard.url)
        yield from _Reader(shard, parquet, layout, settings, skip, stats).samples()


def check_columns(shard: Shard, fields: Set[str]) -> None:
    """Look into a file's footer: ColumnError where no image column, or no such field, is found."""
    with open_shard(shard) as raw, _open(raw, shard, ShardStats()) as parquet:
        schema = parquet.schema_arrow
        layout = layout_of(schema, shard.columns, fields, shard.url)
        check_fields(schema, layout, fields, shard.url)


def _open(raw: BinaryIO, shard: Shard, stats: ShardStats) -> pq.ParquetFile:
    """Read the footer."""
    file = io.BufferedReader(CountedFile(raw, stats), 1 << 16)
    if not file.seekable():
        raise ShardError(shard.url, "Parquet is read from its end, which this source cannot give")
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(len(MAGIC))
        file.seek(max(0, size - len(MAGIC)))
        tail = file.read(len(MAGIC))
        if not size:
            raise ShardError(shard.url, "the file is empty (0 bytes), wanted Parquet")
        if head != MAGIC:
            raise ShardError(shard.url, f"no Parquet file: it begins with {head!r}")
        if tail != MAGIC or size < 12:
            raise ShardError(
                shard.url, f"no Parquet footer at its end ({size} bytes): cut, or never finished"
            )
        return pq.ParquetFile(
            file, buffer_size=PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise ShardError(shard.url, f"the Parquet footer cannot be read: {_said(error)}") from error


class _Reader:
    """The state of one pass over one file."""

    def __init__(
        self,
        shard: Shard,
        parquet: pq.ParquetFile,
        layout: Layout,
        settings: ReaderSettings,
        skip: Container[int],
        stats: ShardStats,
    ) -> None:
        self._shard = shard
        self._parquet = parquet
        self._layout = layout
        self._max_bytes = settings.max_member_bytes
        self._max_field_bytes = settings.max_field_bytes
        self._skip = skip
        self._stats = stats

    def samples(self) -> Iterator[Sample]:
        """Go through the row groups."""
        found = self._parquet.metadata
        counts = [found.row_group(group).num_rows for group in range(found.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != found.num_rows:
            raise ShardError(self._shard.url, "the Parquet footer contradicts itself: rows")
        first = 0
        for group, num_rows in enumerate(counts):
            rows = range(first, first + num_rows)
            wanted = [row for row in rows if row not in self._skip]  # asked once for each row
            self._stats.num_images += num_rows - len(wanted)
            self._stats.num_skipped += num_rows - len(wanted)
            if wanted:
                yield from self._group(group, rows, frozenset(wanted), wanted[-1])
            first += num_rows
            self._stats.note_place((self._shard.size or 0) * first // max(1, found.num_rows))

    def _group(
        self, group: int, rows: range, wanted: frozenset[int], last: int
    ) -> Iterator[Sample]:
        """Yield the wanted rows of one row group."""
        row = rows.start
        try:
            for batch in self._parquet.iter_batches(
                self._batch_rows(group), [group], self._layout.read, use_threads=False
            ):
                if row + batch.num_rows > rows.stop:
                    break
                yield from self._batch(batch, row, wanted)
                row += batch.num_rows
                if row > last:
                    return
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise ShardError(
                self._shard.url, f"damaged in row group {group}, after row {row}: {_said(error)}"
            ) from error
        raise ShardError(
            self._shard.url, f"damaged: row group {group} has not the rows that its footer names"
        )

    def _batch_rows(self, group: int) -> int:
        """Return how many rows make a batch, by the mean size of a row.

        The sizes of single columns are not asked for: in a damaged footer they end the process.
        """
        found = self._parquet.metadata.row_group(group)
        mean = max(1, found.total_byte_size // max(1, found.num_rows))
        return int(max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // mean)))

    def _batch(self, batch: pa.RecordBatch, first: int, wanted: frozenset[int]) -> Iterator[Sample]:
        rows = range(first, first + batch.num_rows)
        if wanted.isdisjoint(rows):
            return
        images, paths = self._images(batch)
        keys = self._values(batch, self._layout.key) if self._layout.key else None
        fields = self._fields(batch)
        for place, row in enumerate(rows):
            if row not in wanted:
                continue
            path = _text(paths[place]) if paths else ""
            data, fault = self._data(images[place], path)
            key = (_text(keys[place]) if keys else "") or f"{row:0{KEY_DIGITS}d}"
            ref = SampleRef(self._shard.id, row, key, path or _named(key, data))
            self._stats.num_images += 1
            self._stats.num_samples += 1
            found = {name: values[place] for name, values in fields.items()}
            yield Sample(ref, data, {n: one for n, one in found.items() if one is not None}, fault)

    def _images(self, batch: pa.RecordBatch) -> tuple[pa.Array, Sequence[object]]:
        column = batch.column(self._layout.image)
        if not self._layout.has_struct:
            return column, ()
        names = [column.type.field(place).name for place in range(column.type.num_fields)]
        paths: Sequence[object] = ()
        if names.count("path") == 1:
            paths = values_of(pc.struct_field(column, "path"))
        return pc.struct_field(column, "bytes"), paths

    def _data(self, image: pa.Scalar, path: str) -> tuple[bytes, SampleError | None]:
        buffer = image.as_buffer() if image.is_valid else None
        size = buffer.size if buffer is not None else 0
        if size > self._max_bytes:
            detail = f"{size} bytes, the limit is {self._max_bytes}"
            return b"", SampleError("too_large", detail)
        if size:
            return bytes(image.as_py()), None
        if path and buffer is None:
            return b"", SampleError(
                "link", f"only the path {path!r}; wanted the picture's bytes in the table"
            )
        what = "no bytes" if buffer is not None else "null"
        return b"", SampleError("empty", f"the column {self._layout.image!r} holds {what}")

    def _fields(self, batch: pa.RecordBatch) -> dict[str, list[bytes | None]]:
        """Return a batch's fields, a value a row."""
        columns = {*self._layout.fields.values(), *self._layout.json_columns}
        values = {name: self._values(batch, name) for name in columns}
        fields = {
            name: [self._bounded(name, field_bytes(one)) for one in values[column]]
            for name, column in self._layout.fields.items()
        }
        if self._layout.json_columns:
            names = self._layout.json_columns
            lines = zip(*(values[name] for name in names), strict=True)
            fields[JSON_FIELD] = [
                self._bounded(JSON_FIELD, _json(dict(zip(names, line, strict=True))))
                for line in lines
            ]
        return fields

    def _values(self, batch: pa.RecordBatch, column: str) -> list[object]:
        return values_of(batch.column(column), self._layout.labels.get(column, ()))

    def _bounded(self, name: str, data: bytes | None) -> bytes | None:
        if data is not None and len(data) > self._max_field_bytes:
            self._stats.junk[f"field {name}: over the size limit"] += 1
            return None
        return data


def _json(row: Mapping[str, object]) -> bytes:
    return json_text(
        {name: _text(value) if isinstance(value, bytes) else value for name, value in row.items()}
    ).encode("utf-8", "surrogatepass")


def _text(value: object) -> str:
    """Return a key or a path as text, whatever its bytes are."""
    if value is None:
        return ""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _named(key: str, data: bytes) -> str:
    """Return a name for an image that has none."""
    kind = sniff(data)
    return f"{key}.{extension_for(kind)}" if kind else key


def _said(error: Any) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
