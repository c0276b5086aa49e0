"""`captionjob verify`: proof that every image has its row, and every row its image.

For each shard the image members are read and hashed again, and held against the rows by index,
key, member name and hash. All problems are collected; nothing is repaired.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa

from jobs.joining import NO_FIELDS, Pair, join_shards, sha256_of
from jobs.results import Output, ShardResult, read_output
from pipeline.errors import JobError, ShardError
from pipeline.input.identity import identify
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.output.folder import Where
from pipeline.output.job_record import JOB_FILE
from pipeline.records import Sample

MAX_THREADS = 4  # hashing and reading leave the interpreter's lock alone


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not hold: how often, where, and the first case of it."""

    where: str
    what: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", first {self.example}" if self.example else ""
        count = f"{self.count:,} x " if self.count > 1 else ""
        return f"{self.where}: {count}{self.what}{example}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and what does not hold."""

    problems: tuple[Problem, ...]
    num_shards: int
    num_images: int
    num_rows: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes of shards over wall time."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Found:
    """Problems of one shard while it is read; each kind keeps its first example."""

    where: str
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, example: str = "", count: int = 1) -> None:
        if count:
            self.counts[what] = self.counts.get(what, 0) + count
            self.examples.setdefault(what, example)

    def problems(self) -> list[Problem]:
        return [
            Problem(self.where, what, count, self.examples[what])
            for what, count in self.counts.items()
        ]


def verify_output(
    folder: Where,
    patterns: Sequence[str],
    *,
    threads: int = MAX_THREADS,
    has_lenient_end: bool = False,
) -> Verification:
    """Read all shards and all rows; RequestError where there is nothing to hold together."""
    began = time.perf_counter()
    output = read_output(folder)
    join = join_shards(output, patterns)
    problems = [*_of_folder(output)]
    problems += [Problem(shard.url, "no rows of this shard", 1) for shard in join.without_result]
    problems += [
        Problem(one.names[0], f"{one.num_rows:,} rows of a shard that is not in --shards", 1)
        for one in join.without_shard
    ]
    settings = replace(NO_FIELDS, has_lenient_end=has_lenient_end)
    with ThreadPoolExecutor(threads) as pool:
        checked = list(pool.map(lambda pair: _check_pair(output, pair, settings), join.pairs))
    for found, _ in checked:
        problems += found.problems()
    return Verification(
        problems=tuple(problems),
        num_shards=len(join.pairs) + len(join.without_result),
        num_images=sum(stats.num_images for _, stats in checked),
        num_rows=output.num_rows,
        num_bytes=sum(stats.bytes_read for _, stats in checked),
        seconds=time.perf_counter() - began,
    )


def _of_folder(output: Output) -> list[Problem]:
    problems = [Problem(fault.name, fault.reason, 1) for fault in output.faults]
    stored = json.loads(output.folder.read(JOB_FILE)).get("fingerprint")
    if stored != output.record.fingerprint:
        what = f"the fingerprint is {stored}, that of its settings {output.record.fingerprint}"
        problems.append(Problem(JOB_FILE, what, 1))
    return problems


def _check_pair(output: Output, pair: Pair, settings: ReaderSettings) -> tuple[_Found, ShardStats]:
    found, stats = _Found(pair.shard.url), ShardStats()
    if not pair.result.is_done:
        found.add("not finished: its rows are in pieces")
    try:
        table = pair.result.table()
    except (JobError, OSError, pa.ArrowException) as error:
        found.add(f"its rows cannot be read: {error}")
        return found, stats
    if not table.schema.equals(output.schema.arrow()):
        found.add("columns that are not the job's", ", ".join(table.schema.names))
        return found, stats
    rows = _Rows(pair.result, table, output.num_captions, found)
    try:
        if not identify(pair.shard).has_same_bytes(pair.result.identity):
            found.add("its bytes have changed since it was captioned")
        for sample in read_shard(pair.shard, settings, stats=stats):
            rows.check(sample, found)
    except ShardError as error:
        found.add(f"the shard cannot be read to its end: {error.detail}")
    rows.check_rest(found)
    return found, stats


class _Rows:
    """The rows of one shard by index, each crossed off when its image was seen."""

    def __init__(
        self, result: ShardResult, table: pa.Table, num_captions: int, found: _Found
    ) -> None:
        self._keys: list[str] = table.column("key").to_pylist()
        self._members: list[str] = table.column("member").to_pylist()
        self._hashes: list[str | None] = table.column("sha256").to_pylist()
        self._num_captions = num_captions
        self._places: dict[int, list[int]] = {}
        for place, index in enumerate(table.column("index").to_pylist()):
            self._places.setdefault(index, []).append(place)
        for shard in table.column("shard").unique().to_pylist():
            if shard != result.id:
                found.add("rows that name another shard", str(shard))
        if "caption_index" in table.column_names:
            self._check_caption_indices(table.column("caption_index").to_pylist(), found)

    def _check_caption_indices(self, numbers: list[int], found: _Found) -> None:
        wanted = list(range(self._num_captions))
        for index, places in self._places.items():
            if [numbers[place] for place in places] != wanted:
                found.add("images with wrong caption indices", f"index {index}")

    def check(self, sample: Sample, found: _Found) -> None:
        """Hold one image member against its rows."""
        ref = sample.ref
        name = f"index {ref.index}, {ref.member}"
        places = self._places.pop(ref.index, None)
        if places is None:
            found.add("images without a row", name)
            return
        if len(places) != self._num_captions:
            found.add(f"images with {len(places)} rows, wanted {self._num_captions}", name)
        digest = sha256_of(sample.data)
        for place in places:
            if not _is_text(ref.key, self._keys[place]):
                found.add("rows with another key", f"{name}: {self._keys[place]}")
            if not _is_text(ref.member, self._members[place]):
                found.add("rows with another member name", f"{name}: {self._members[place]}")
            if (self._hashes[place] or "") != digest:
                found.add("rows with another image's hash", name)

    def check_rest(self, found: _Found) -> None:
        """Whatever is left has no image."""
        for index, places in self._places.items():
            key = self._keys[places[0]]
            found.add("rows without an image", f"index {index}, {key}", len(places))


def _is_text(found: str, stored: str) -> bool:
    """Compare as the store writes: what is no UTF-8 is stored as an escape."""
    return found == stored or found.encode("utf-8", "backslashreplace").decode() == stored
