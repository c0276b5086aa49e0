"""Comma-separated values: text is quoted, what is missing is empty and not quoted."""

from __future__ import annotations

from pathlib import Path

from pyarrow import csv

from jobs.export.options import ExportOptions
from jobs.export.source import Source


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write all columns of the rows to the file `place`; return the rows written."""
    num_rows = 0
    with csv.CSVWriter(place, source.schema) as writer:
        for table in source.tables():
            writer.write_table(table.cast(source.schema))
            num_rows += table.num_rows
    return num_rows
