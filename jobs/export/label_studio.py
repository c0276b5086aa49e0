"""Label Studio tasks: each image with its caption as a pre-annotation that people correct.

    FILE.json         the tasks, to be imported into a project
    FILE.config.xml   the labelling interface that goes with them

The image is an address by `--image-url`, or else the picture itself as a data URI. What comes
back goes through `captionjob import --from label-studio`, which finds each row by `data`.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

from jobs.export.options import ExportOptions
from jobs.export.rows_json import row_json
from jobs.export.source import ExportRow, Source
from jobs.export.urls import image_url
from pipeline.errors import SampleError
from pipeline.images.formats import sniff
from pipeline.images.opening import open_sample
from pipeline.records import Sample

FROM_NAME, TO_NAME = "caption", "image"
CONFIG = f"""<View>
  <Image name="{TO_NAME}" value="$image" zoom="true"/>
  <Header value="Caption"/>
  <TextArea name="{FROM_NAME}" toName="{TO_NAME}" rows="4" editable="true" maxSubmissions="1"/>
</View>
"""
_MIME = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
_DATA = ("shard", "index", "caption_index", "key", "member", "sha256", "caption")


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write the tasks to the file `place`; return how many."""
    num_rows = 0
    with place.open("w", encoding="utf-8") as file:
        file.write("[")
        for row, image in _rows(source, options):
            num_rows += 1
            task = json.dumps(_task(source.output.model, row, image), ensure_ascii=False)
            file.write(f"{',' if num_rows > 1 else ''}\n{task}")
        file.write("\n]\n")
    return num_rows


def companions(place: Path) -> dict[str, str]:
    """Return the small files that belong beside an export: name -> text."""
    return {f"{place.name.removesuffix('.json')}.config.xml": CONFIG}


def _rows(source: Source, options: ExportOptions) -> Iterator[tuple[ExportRow, str]]:
    if options.image_url:
        for row in source.rows():
            yield row, image_url(options.image_url, row.row)
        return
    for _, images in source.images():
        for sample, rows in images:
            uri = _data_uri(sample)
            for row in rows:
                yield row, uri


def _task(model: str, row: ExportRow, image: str) -> dict[str, object]:
    columns = row_json(row)
    prediction: dict[str, object] = {
        "model_version": model,
        "result": [
            {
                "id": f"{row.row.ref.shard}-{row.row.ref.index}-{row.row.caption_index}",
                "from_name": FROM_NAME,
                "to_name": TO_NAME,
                "type": "textarea",
                "value": {"text": [row.caption]},
            }
        ],
    }
    if row.row.mean_logprob is not None:
        prediction["score"] = math.exp(min(0.0, row.row.mean_logprob))
    data = {"image": image, **{name: columns[name] for name in _DATA}}
    return {"data": data, "predictions": [prediction] if row.caption else []}


def _data_uri(sample: Sample) -> str:
    """Return the bytes as they are where browsers read the format, else as PNG."""
    data, mime = sample.data, _MIME.get(sniff(sample.data), "")
    if not mime:
        try:
            buffer = io.BytesIO()
            open_sample(sample)[0].save(buffer, "PNG")
            data, mime = buffer.getvalue(), "image/png"
        except SampleError:
            mime = "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
