"""One JSON object a row, one row a line."""

from __future__ import annotations

import json
from pathlib import Path

from jobs.export.options import ExportOptions
from jobs.export.source import Source


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write all columns of the rows to the file `place`; return the rows written."""
    num_rows = 0
    with place.open("w", encoding="utf-8", newline="\n") as file:
        for table in source.tables():
            for batch in table.to_batches(max_chunksize=2048):
                for values in batch.to_pylist():
                    file.write(json.dumps(values, ensure_ascii=False) + "\n")
            num_rows += table.num_rows
    return num_rows
