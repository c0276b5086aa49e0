"""One Parquet file of all rows, or an existing table of the shards with the captions joined in."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.export.options import ExportOptions
from jobs.export.source import Source
from pipeline.errors import RequestError


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write the file `place`; return the rows that have a caption's columns."""
    if options.table is not None:
        return _write_joined(source, place, options.table, options.on)
    num_rows = 0
    metadata = {"captionjob": source.output.record.to_json()}
    with pq.ParquetWriter(place, source.schema.with_metadata(metadata), compression="zstd") as file:
        for table in source.tables():
            file.write_table(table.cast(source.schema))
            num_rows += table.num_rows
    return num_rows


def _write_joined(source: Source, place: Path, path: Path, on: str) -> int:
    """Add the columns to the table's own rows, in their order; none is lost, none comes twice."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"--table {str(path)!r} cannot be read as Parquet: {reason}") from None
    rows = pa.concat_tables([source.schema.empty_table(), *source.tables()])
    for name, found in (("--table", table), ("OUT", rows)):
        if on not in found.column_names:
            raise RequestError(f"--on {on}: {name} has no column of that name")
    places: dict[str, int] = {}
    for number, value in enumerate(rows.column(on).to_pylist()):
        if value is not None and places.setdefault(str(value), number) != number:
            raise RequestError(
                f"--on {on}: {value!r} stands in several rows of OUT, so that a join would be a "
                "guess; wanted a column that differs, such as sha256"
            )
    # As text: a key that is all digits may well be a number in the other table.
    wanted = [places.get(str(value)) for value in table.column(on).to_pylist()]
    found = rows.take(pa.array(wanted, pa.int64()))
    for name in rows.column_names:
        if name != on:
            new = name if name not in table.column_names else f"captionjob_{name}"
            table = table.append_column(new, found.column(name))
    pq.write_table(table, place, compression="zstd")
    return sum(number is not None for number in wanted)
