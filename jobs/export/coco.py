"""COCO captions: `images` and `annotations`, as pycocotools reads them.

Written as a stream, images first; numbers begin at 1 and follow the rows' order.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from jobs.export.options import ExportOptions
from jobs.export.rows_json import row_json
from jobs.export.source import ExportRow, Source
from jobs.export.urls import image_url

_IMAGE = ("shard", "index", "key", "sha256", "format")
_ANNOTATION = (
    *("status", "finish_reason", "mean_logprob", "num_caption_tokens", "caption_index"),
    *("corrected_by", "corrected_at", "error"),
)


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write the file `place`; return the captions written."""
    num_rows = num_images = 0
    last: tuple[str, int] | None = None
    with place.open("w", encoding="utf-8") as file, TemporaryFile("w+", encoding="utf-8") as rest:
        info = {"description": "captions by captionjob", **source.output.record.settings}
        file.write(f'{{"info": {_dumps(info)}, "licenses": [], "images": [')
        for row in source.rows():
            image = (row.row.ref.shard, row.row.ref.index)
            if image != last:
                num_images += 1
                last = image
                _write_item(file, _image(row, num_images, options), num_images)
            num_rows += 1
            _write_item(rest, _annotation(row, num_rows, num_images), num_rows)
        file.write('\n], "annotations": [')
        rest.seek(0)
        while block := rest.read(1 << 20):
            file.write(block)
        file.write("\n]}\n")
    return num_rows


def _image(row: ExportRow, number: int, options: ExportOptions) -> dict[str, object]:
    columns = row_json(row)
    found: dict[str, object] = {
        "id": number,
        "file_name": row.row.ref.member,
        "width": row.row.facts.width,
        "height": row.row.facts.height,
        **{name: columns[name] for name in _IMAGE},
    }
    if options.image_url:
        found["coco_url"] = image_url(options.image_url, row.row)
    return found


def _annotation(row: ExportRow, number: int, image: int) -> dict[str, object]:
    columns = row_json(row)
    found: dict[str, object] = {"id": number, "image_id": image, "caption": row.caption}
    if row.correction is not None:
        found["model_caption"] = row.row.caption
    return found | {name: columns[name] for name in _ANNOTATION if columns.get(name) is not None}


def _write_item(file: TextIO, item: dict[str, object], number: int) -> None:
    file.write(f"{',' if number > 1 else ''}\n{_dumps(item)}")


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
