"""How fast the same pictures are read from tars, Parquet files and a folder, without a network.

Each kind is read to its end several times, in turn, by `read_shard` with all of its fields; the
files are in the page cache. What is told is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.fixtures import make_tar_bytes
from pipeline.input.reader import ReaderSettings, read_shard
from pipeline.input.shards import expand_shards

IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
PER_SHARD = 1000


def write(folder: Path, num_pictures: int, num_bytes: int) -> dict[str, str]:
    """Write random bytes, which compress as little as pictures do; return a pattern a kind."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(num_bytes // 2, num_bytes * 3 // 2, num_pictures)
    for kind in ("tars", "datasets", "large-groups", "photos"):
        (folder / kind).mkdir()
    for first in range(0, num_pictures, PER_SHARD):
        numbers = range(first, min(first + PER_SHARD, num_pictures))
        pictures = [b"\xff\xd8\xff" + rng.bytes(int(sizes[number])) for number in numbers]
        titles = [f"picture {number}" for number in numbers]
        members = []
        for number, data, title in zip(numbers, pictures, titles, strict=True):
            members += [(f"{number:07d}.jpg", data), (f"{number:07d}.txt", title.encode())]
            (folder / "photos" / f"{number:07d}.jpg").write_bytes(data)
            (folder / "photos" / f"{number:07d}.txt").write_text(title)
        (folder / "tars" / f"{first:07d}.tar").write_bytes(make_tar_bytes(members))
        rows = [{"bytes": data, "path": None} for data in pictures]
        table = pa.table({"image": pa.array(rows, IMAGE), "txt": titles})
        place = folder / "datasets" / f"{first:07d}.parquet"
        pq.write_table(table, place, use_content_defined_chunking=True, row_group_size=100)
        pq.write_table(table, folder / "large-groups" / place.name)
    return {kind: str(folder / kind) for kind in ("tars", "datasets", "large-groups", "photos")}


def read(pattern: str) -> tuple[float, int]:
    """Read all; return the seconds and the bytes of the pictures."""
    began, num_bytes = time.perf_counter(), 0
    for shard in expand_shards([pattern]):
        for sample in read_shard(shard, ReaderSettings(frozenset({"txt"}))):
            assert sample.fields["txt"]
            num_bytes += len(sample.data)
    return time.perf_counter() - began, num_bytes


def main() -> int:
    """Write, read, and print a line for each kind, last one of JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench-reading", description=__doc__)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=100_000, help="of a picture, about")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        patterns = write(Path(folder), asked.pictures, asked.bytes)
        rounds = [
            {kind: read(pattern) for kind, pattern in patterns.items()} for _ in range(asked.rounds)
        ]
    rates = {}
    for kind in patterns:
        seconds = statistics.median(one[kind][0] for one in rounds)
        rates[kind] = round(asked.pictures / seconds)
        megabytes = rounds[0][kind][1] / seconds / 1e6
        print(f"{kind:13} {rates[kind]:7} images/s {megabytes:7.0f} MB/s")
    print(json.dumps({"pictures": asked.pictures, "bytes": asked.bytes, "images_per_s": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
