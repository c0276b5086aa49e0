"""A `.txt` beside each image, all in one folder, as LoRA trainers read them.

`captions.jsonl` says which file is which row. Several captions of an image are several lines.
"""

from __future__ import annotations

import json
from pathlib import Path

from jobs.export.names import Names
from jobs.export.options import ExportOptions
from jobs.export.rows_json import row_json
from jobs.export.source import Source
from jobs.export.webdataset import image_extension

MANIFEST = "captions.jsonl"


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write pictures and captions into the folder `place`; return the captions written."""
    place.mkdir()
    names = Names()
    num_rows = 0
    with (place / MANIFEST).open("w", encoding="utf-8", errors="backslashreplace") as manifest:
        for _, images in source.images():
            for sample, rows in images:
                stem = names.name(sample.ref.key)
                (place / stem).parent.mkdir(parents=True, exist_ok=True)
                text = "\n".join(row.caption for row in rows)
                data = text.encode("utf-8", "backslashreplace")
                (place / f"{stem}.txt").write_bytes(data)
                picture = f"{stem}.{image_extension(sample)}"
                if options.with_images:
                    (place / picture).write_bytes(sample.data)
                for row in rows:
                    line = {"file_name": picture, **row_json(row)}
                    print(json.dumps(line, ensure_ascii=False), file=manifest)
                num_rows += len(rows)
    return num_rows
