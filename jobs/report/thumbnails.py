"""Small pictures of the shown rows, read from the shards, as addresses with the data inside."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from PIL import Image

from jobs.joining import Pair, joined_rows
from pipeline.errors import SampleError, ShardError
from pipeline.images.opening import ImageSettings, open_sample
from pipeline.records import Row, Sample

SIZES = (320, 240, 160, 96)  # pixels of the longer side; the first that fits the page
QUALITY = 74
MAX_BYTES = 20 << 20  # of all thumbnails on a page, written out
THREADS = 4
LENIENT = ImageSettings(allow_truncated=True)

RowPlace = tuple[str, int]  # shard, index


@dataclass(slots=True)
class Thumbnails:
    """Addresses of small pictures by row, and what could not be read."""

    uris: dict[RowPlace, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_thumbnails(pairs: Sequence[Pair], rows: Iterable[Row]) -> Thumbnails:
    """Read the pictures of `rows`; those that do not open have no address."""
    by_shard: dict[str, list[Row]] = {}
    for row in rows:
        by_shard.setdefault(row.ref.shard, []).append(row)
    made = Thumbnails()
    pictures: dict[RowPlace, bytes] = {}
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for pair in pairs:
            wanted = by_shard.get(pair.result.id)
            if wanted:
                pictures.update(_of_shard(pair, wanted, made.notes, pool))
    made.uris = fitted(pictures)
    return made


def fitted(pictures: Mapping[RowPlace, bytes]) -> dict[RowPlace, str]:
    """Return addresses; where all together would be too long, all of a smaller size."""
    for size in SIZES[1:]:
        if sum(len(data) for data in pictures.values()) * 4 / 3 <= MAX_BYTES:
            break
        pictures = {place: _smaller(data, size) for place, data in pictures.items()}
    return {place: _uri(data) for place, data in pictures.items()}


def _of_shard(
    pair: Pair, rows: Sequence[Row], notes: list[str], pool: ThreadPoolExecutor
) -> dict[RowPlace, bytes]:
    """Return a shard's pictures; of a damaged one those that came before the damage."""
    made = []
    try:
        for sample, mine in joined_rows(pair, rows):
            place = (mine[0].ref.shard, mine[0].ref.index)
            made.append((place, pool.submit(thumbnail, sample, SIZES[0])))
            if len(made) > 4 * THREADS:  # hold few originals at once
                made[-4 * THREADS][1].result()
    except ShardError as error:
        notes.append(str(error))
    found = {place: future.result() for place, future in made}
    return {place: data for place, data in found.items() if data}


def thumbnail(sample: Sample, size: int) -> bytes:
    """Return a picture as a small WebP; nothing for one that does not open at all."""
    try:
        image, _ = open_sample(sample, LENIENT)
    except SampleError:
        return b""
    # A first shrink by whole factors is many times faster on large photographs.
    image.thumbnail((size, size), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _encode(image)


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY, method=2)
    return buffer.getvalue()


def _smaller(data: bytes, size: int) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((size, size), Image.Resampling.BICUBIC)
        return _encode(image)


def _uri(data: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(data).decode()}"
