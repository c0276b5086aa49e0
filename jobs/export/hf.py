"""A folder that `datasets.load_dataset` opens, with the images inside and all columns.

    README.md                      the dataset's card
    data/train-00000.parquet ...   image (bytes as they were in the shard), caption, columns

The files say in their metadata, as `datasets` itself does, which column is an image; the
library is not needed to write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.export.options import ExportOptions
from jobs.export.rows_json import row_json
from jobs.export.source import CORRECTED_COLUMNS, Source
from jobs.export.webdataset import image_extension
from pipeline.errors import RequestError

MAX_FILE_BYTES = 500 << 20
GROUP_BYTES = 32 << 20  # of a row group: what a reader of one row has to take in
_IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write the folder `place`; return the rows written."""
    (place / "data").mkdir(parents=True)
    schema = _schema(source)
    num_rows = 0
    writer: pq.ParquetWriter | None = None
    num_files = num_bytes = 0
    try:
        for table, size in _tables(source, schema):
            if writer is None or num_bytes > MAX_FILE_BYTES:
                if writer is not None:
                    writer.close()
                path = place / "data" / f"train-{num_files:05d}.parquet"
                # Pictures are compressed already; the rest is small.
                writer = pq.ParquetWriter(path, schema, compression={"image.bytes": "none"})
                num_files, num_bytes = num_files + 1, 0
            writer.write_table(table)
            num_bytes += size
            num_rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    if not num_rows:
        raise RequestError(
            "no row is wanted by these filters, and `datasets` opens no empty folder"
        )
    card = _card(source, num_rows)
    (place / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
    return num_rows


def _tables(source: Source, schema: pa.Schema) -> Iterator[tuple[pa.Table, int]]:
    """Yield row groups with the bytes of their pictures."""
    lines: list[dict[str, object]] = []
    num_bytes = 0
    for _, images in source.images():
        for sample, rows in images:
            name = f"{sample.ref.key}.{image_extension(sample)}"
            image = {"bytes": sample.data, "path": name}
            for row in rows:
                columns = row_json(row)
                columns["model_caption"] = row.row.caption
                columns["caption"] = row.caption
                lines.append({"image": image, **columns})
                num_bytes += len(sample.data)
            if num_bytes > GROUP_BYTES:
                yield _table(lines, schema), num_bytes
                lines, num_bytes = [], 0
    if lines:
        yield _table(lines, schema), num_bytes


def _table(lines: list[dict[str, object]], schema: pa.Schema) -> pa.Table:
    columns = [
        pa.array([line.get(name) for line in lines], schema.field(name).type)
        for name in schema.names
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _schema(source: Source) -> pa.Schema:
    """Return `image`, `caption`, then all columns; where there are corrections, the model's too."""
    fields = {field.name: field for field in source.output.schema.arrow()}
    names = ["caption", *(name for name in fields if name not in ("caption", "image"))]
    columns = [pa.field("image", _IMAGE), *(fields[name].with_nullable(True) for name in names)]
    if source.corrections:
        extra = ("model_caption", *CORRECTED_COLUMNS)
        columns += [pa.field(name, pa.string()) for name in extra]
    features = {
        field.name: {"_type": "Image"}
        if field.name == "image"
        else {"dtype": _dtype(field.type), "_type": "Value"}
        for field in columns
    }
    return pa.schema(
        columns,
        metadata={
            "huggingface": json.dumps({"info": {"features": features}}),
            "captionjob": source.output.record.to_json(),
        },
    )


def _dtype(kind: pa.DataType) -> str:
    """Return the name that `datasets` has for an Arrow type."""
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _card(source: Source, num_rows: int) -> str:
    settings = json.dumps(dict(source.output.record.settings), indent=2, ensure_ascii=False)
    return (
        "---\ntask_categories:\n- image-to-text\n---\n\n"
        f"# {num_rows:,} captioned images\n\n"
        "Made by captionjob. `caption` is a person's correction where there is one, else the "
        "model's.\n\n    from datasets import load_dataset\n"
        '    load_dataset("path/to/this/folder", split="train")\n\n'
        f"Settings that shaped the captions:\n\n```json\n{settings}\n```\n"
    )
