"""S3 in and out on a real server that is broken in every way, while somebody reads the output.

    worker ──► FaultProxy: cuts, resets, stalls ──► SeaweedFS: killed -9, and back ◄── reader

The worker is killed in the middle of a large file's upload, and again at a moment of no account.
All the while a reader lists the output and reads each file that it sees, whole. At the end the
rows are held against those of an untroubled process on this disk, one by one.

    python -m scripts.cluster.s3_out FOLDER
"""

from __future__ import annotations

import base64
import io
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.fixtures import make_image_bytes, make_shard
from scripts.cluster.fault_proxy import Fault, FaultProxy
from scripts.cluster.job import Job
from scripts.cluster.result import Result
from scripts.cluster.seaweed import READER, Seaweed
from tests.commands import captionjob, start

BUCKET, PREFIX, CALM = "captions", "run", "calm"
BIG_SHARDS, BIG_TEXT = 2, 330_000  # so that a shard's file is larger than one part
SAMPLES = 40
# Of the way up and of the way down: a byte count lands in the middle of a put, or of an answer.
PLAN = [
    Fault("fin", 60_000, upward=True),
    Fault("rst", 1_200_000, upward=True),
    Fault("stall", 3_000_000, upward=True),
    Fault("rst", 100),
    Fault("fin", 700),
    Fault("stall", 2_000),
    Fault("rst", 400_000),
]


@dataclass
class Reader:
    """Reads whatever is visible again and again, past the proxy, and counts what is not whole."""

    store: Seaweed
    expected: Mapping[str, int]  # rows of each finished shard, by the head of its file's name
    num_looks: int = 0
    num_files: int = 0
    num_unanswered: int = 0
    faults: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Reader:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        seen: set[str] = set()
        while not self._end.wait(0.05):
            try:
                for name, tag, size in _listing(self.store, PREFIX):
                    if name.endswith(".parquet") and (name + tag) not in seen:
                        self._read(name, size)
                        seen.add(name + tag)
                self.num_looks += 1
            except Exception:  # the server is dead, or half awake
                self.num_unanswered += 1

    def _read(self, name: str, size: int) -> None:
        try:
            data = _get(self.store, f"{PREFIX}/{name}")
        except self.store.client().exceptions.NoSuchKey:
            return  # a piece of a shard that was finished this moment
        self.num_files += 1
        try:
            file = pq.ParquetFile(io.BytesIO(data))
            num_rows = file.read(use_threads=False).num_rows
        except Exception as error:  # whatever a reader says of half a file
            self.faults.append(f"{name} ({size} bytes) is not whole: {error}")
            return
        wanted = file.metadata.num_rows
        if "/" not in name:
            wanted = self.expected[_head(name)]
        if num_rows != wanted or not num_rows:
            self.faults.append(f"{name} has {num_rows} rows, wanted {wanted}")


@dataclass
class Breaking:
    """One job, and everything that is done to it."""

    folder: Path
    store: Seaweed
    job: Job
    starts: int = 0
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def options(self, prefix: str) -> list[str]:
        """Return the words of a run that reads and writes the store."""
        words = self.job.options("nowhere", latency=0.03)
        words[words.index("--shards") + 1] = "s3://shards/*.tar"
        words[words.index("--out") + 1] = f"s3://{BUCKET}/{prefix}"
        return [*words, "--store-retry-seconds", "120"]

    def begin(self, proxy: FaultProxy, **more: str) -> subprocess.Popen[str]:
        """Start the worker behind the proxy."""
        self.starts += 1
        return start(self.options(PREFIX), self.folder, {**self.environment(proxy), **more})

    def environment(self, proxy: FaultProxy) -> dict[str, str]:
        """Return the worker's variables: short time-outs, and parts as small as stores allow."""
        return {
            **self.store.environment(endpoint=proxy.endpoint),
            "CAPTIONJOB_STALL_SECONDS": "3",
            "CAPTIONJOB_MAX_WAIT_SECONDS": "2",
            "CAPTIONJOB_PART_BYTES": str(5 << 20),
        }

    def refuse(self) -> None:
        """A wrong secret, a user who may only read, no bucket: one line each, before weights."""
        options = self.options(PREFIX)
        options[options.index("--shards") + 1] = str(self.job.folder / "shards")
        nowhere = [one.replace(f"s3://{BUCKET}/", "s3://absent/") for one in options]
        cases = (
            ("wrong secret", options, self.store.environment(secret="wrong"), "denied"),
            ("read-only user", options, self.store.environment(READER), "denied"),
            ("missing bucket", nowhere, self.store.environment(), "absent"),
        )
        for name, words, extra, message in cases:
            done = captionjob(*words, cwd=self.folder, extra=extra)
            is_told = message in done.stderr and "loading" not in done.stderr
            is_secret = any(secret in done.stderr for secret in _secrets(extra))
            if done.returncode != 2 or done.stderr.count("\n") != 1 or not is_told or is_secret:
                self.faults.append(f"{name}: exit {done.returncode}: {done.stderr[-300:]}")
        self.notes.append(f"{len(cases)} wrong requests refused in one line")

    def run(self, proxy: FaultProxy) -> None:
        """Break everything in turn, and let the last worker end."""
        proxy.plan = list(PLAN)
        process = self.begin(proxy, CAPTIONJOB_KILL_AT="part-put:1")
        self.expect(process, -9, "killed in the middle of an upload")
        left = len(_uploads(self.store))
        self.notes.append(f"killed in an upload: {left} left open")
        if not left:
            self.faults.append("no upload was left open: nothing was tested")
        process = self.begin(proxy)
        self.wait_for(0.3, process)
        process.kill()
        self.expect(process, -9, "killed")
        proxy.plan += list(PLAN)
        process = self.begin(proxy)
        self.wait_for(0.5, process)
        began = time.monotonic()
        self.store.kill()
        self.store.start()
        self.notes.append(f"the server was away for {time.monotonic() - began:.0f} s")
        self.expect(process, 0, "the last one")
        uploads = _uploads(self.store)
        if uploads:
            self.faults.append(f"uploads left open: {uploads}")

    def expect(self, process: subprocess.Popen[str], code: int, what: str) -> None:
        """Wait for a worker's end."""
        _, errors = process.communicate(timeout=240)
        if process.returncode != code:
            self.faults.append(f"{what}: exit {process.returncode}: {errors[-500:]}")
        for secret in _secrets(self.store.environment()):
            if secret in errors:
                self.faults.append(f"{what}: a secret in its messages")

    def wait_for(self, share: float, process: subprocess.Popen[str]) -> None:
        """Wait until this share of the shards has files."""
        wanted = share * self.job.num_shards
        while process.poll() is None:
            if sum("/" not in name for name, *_ in _listing(self.store, PREFIX)) - 2 >= wanted:
                return
            time.sleep(0.1)

    def compare(self) -> int:
        """Hold all rows against those of the local run; return how many there are."""
        files = {name: _get(self.store, f"{PREFIX}/{name}") for name, *_ in self.listing()}
        finals = {name: data for name, data in files.items() if _is_final(name)}
        found = [row for data in finals.values() for row in _rows(data)]
        local = (self.job.folder / "alone").glob("*.parquet")
        wanted = [row for path in local for row in _rows(path.read_bytes())]
        if len({_key(row) for row in found}) != len(found):
            self.faults.append("rows twice")
        if sorted(found, key=_key) != sorted(wanted, key=_key):
            lost = {_key(row) for row in wanted} - {_key(row) for row in found}
            self.faults.append(f"rows differ; {len(lost)} lost")
        rest = [name for name in files if name.startswith(("_progress/", "_uploads/", "_aside/"))]
        if rest:
            self.faults.append(f"left over: {rest[:3]}")
        for secret in _secrets(self.store.environment()):
            if any(secret.encode() in data for data in files.values()):
                self.faults.append("a secret in the output")
        return len(found)

    def listing(self) -> list[tuple[str, str, int]]:
        """Return all files of the output."""
        return list(_listing(self.store, PREFIX))


def s3_out(workdir: Path, binary: Path | None = None) -> Result:
    """Run it all below `workdir`; without its `binary` the server is looked for, or installed."""
    workdir.mkdir(parents=True, exist_ok=True)
    job = _job(workdir / "job")
    expected = {
        _head(path.name): pq.read_metadata(path).num_rows
        for path in (job.folder / "alone").glob("*.parquet")
    }
    with Seaweed(workdir, binary=binary) as store:
        for bucket in ("shards", BUCKET):
            store.make_bucket(bucket)
        for path in sorted((job.folder / "shards").glob("*.tar")):
            store.client().upload_file(str(path), "shards", path.name)
        breaking = Breaking(workdir, store, job)
        breaking.refuse()
        calm = _calm(breaking)
        proxy = FaultProxy(("127.0.0.1", store.port))
        began = time.monotonic()
        with proxy, Reader(store, expected) as reader:
            breaking.run(proxy)
        seconds = time.monotonic() - began
        num_rows = breaking.compare()
    faults = [*breaking.faults, *reader.faults]
    broken = f"{proxy.num_faults} broken connections"
    looks = f"{reader.num_looks} looks, {reader.num_files} files read while it ran, "
    looks += f"{len(reader.faults)} of them not whole"
    return Result(
        name="s3 in and out: cuts, stalls, kills of worker and server",
        is_ok=not faults and num_rows == job.num_rows,
        rows=num_rows,
        retries=breaking.starts - 1 + proxy.num_faults,
        seconds=seconds,
        seconds_lost=max(0.0, seconds - calm),
        detail="; ".join([*faults, *breaking.notes, broken, looks]),
    )


def _calm(breaking: Breaking) -> float:
    """Return the seconds of a run that nobody breaks."""
    began = time.monotonic()
    extra = breaking.store.environment()
    done = captionjob(*breaking.options(CALM), cwd=breaking.folder, extra=extra)
    if done.returncode:
        breaking.faults.append(f"the calm run: exit {done.returncode}: {done.stderr[-500:]}")
    return time.monotonic() - began


def _job(folder: Path) -> Job:
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for number in range(BIG_SHARDS):
        noise = random.Random(number)
        members: list[Any] = []
        for index in range(SAMPLES):
            members.append((f"{index:03d}.jpg", make_image_bytes(seed=5000 * number + index)))
            members.append((f"{index:03d}.txt", base64.b85encode(noise.randbytes(BIG_TEXT))))
        make_shard(folder / "shards" / f"{number:03d}.tar", members)
    return Job(folder, num_shards=8, samples=SAMPLES)


def _listing(store: Seaweed, prefix: str) -> Iterator[tuple[str, str, int]]:
    pages = store.client().get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
        for one in page.get("Contents", []):
            yield one["Key"].removeprefix(f"{prefix}/"), one["ETag"], one["Size"]


def _get(store: Seaweed, key: str) -> bytes:
    return bytes(store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())


def _uploads(store: Seaweed) -> list[str]:
    found = store.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [one["Key"] for one in found]


def _rows(data: bytes) -> list[dict[str, Any]]:
    rows = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False).to_pylist()
    return [{**row, "shard": _head(row["shard"])} for row in rows]  # an address is in its id


def _head(name: str) -> str:
    return name.partition("-")[0]


def _is_final(name: str) -> bool:
    return name.endswith(".parquet") and "/" not in name


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["shard"], row["index"]


def _secrets(extra: Mapping[str, str]) -> list[str]:
    return [extra["AWS_SECRET_ACCESS_KEY"]] if len(extra["AWS_SECRET_ACCESS_KEY"]) > 8 else []


if __name__ == "__main__":
    found = s3_out(Path(sys.argv[1]))
    print(f"{'ok' if found.is_ok else 'FAILED'}: {found.name}: {found.rows} rows, {found.retries}")
    print(f"retries, {found.seconds:.0f} s, {found.seconds_lost:.0f} s lost: {found.detail}")
    sys.exit(not found.is_ok)
