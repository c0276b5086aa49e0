"""Tars with the caption added: the images and all their fields untouched, byte for byte.

    KEY.jpg  KEY.json  KEY.txt  KEY.captionjob.json      the row, whatever else is filtered

Readers of WebDataset end a key at its first dot and want each key once in a tar; a key for
which that does not hold gets another name, and its row in `KEY.captionjob.json` has the old one.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from jobs.export.names import Names
from jobs.export.options import ExportOptions
from jobs.export.rows_json import row_json
from jobs.export.source import ExportRow, Source
from pipeline.errors import RequestError
from pipeline.images.formats import extension_of, sniff
from pipeline.input.reader import ReaderSettings
from pipeline.records import Sample, Shard

ROW_FIELD = "captionjob.json"
ALL_FIELDS = ReaderSettings()


def write(source: Source, place: Path, options: ExportOptions) -> int:
    """Write one tar a shard into the folder `place`; return the captions written."""
    place.mkdir()
    num_rows = 0
    for shard, images in source.images(ALL_FIELDS):
        names = Names(keeps_dots=False)
        with tarfile.open(place / f"{shard.id}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for sample, rows in images:
                for name, data in _members(shard, sample, rows, names, options):
                    _add(tar, name, data)
                num_rows += len(rows)
    return num_rows


def _members(
    shard: Shard, sample: Sample, rows: list[ExportRow], names: Names, options: ExportOptions
) -> Iterator[tuple[str, bytes]]:
    """Yield a sample's members: image, fields, captions and row."""
    captions = {
        (
            options.field
            if row.row.caption_index == 0
            else f"{row.row.caption_index}.{options.field}"
        ): row.caption.encode("utf-8", "backslashreplace")
        for row in rows
    }
    fields = {**sample.fields}
    taken = [name for name in captions if name in fields]
    if taken and not options.replace:
        raise RequestError(
            f"{shard.url}: {sample.ref.key} has a member {taken[0]} already; wanted --field NAME "
            "for another one, or --replace to put the caption in its place"
        )
    key = names.name(sample.ref.key)
    yield f"{key}.{image_extension(sample)}", sample.data
    for name, data in {**fields, **captions}.items():
        yield f"{key}.{name}", data
    lines = [row_json(row) for row in rows]
    found = lines[0] if len(lines) == 1 else lines
    yield f"{key}.{ROW_FIELD}", json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")


def image_extension(sample: Sample) -> str:
    """Return the extension of the member's name, or that of its format if it has none."""
    return extension_of(sample.ref.member) or sniff(sample.data).lower() or "bin"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
