"""Kill the real command again and again, and compare what it leaves with an untroubled run.

Each job over a handful of shards (tars, Parquet files and folders of pictures, broken pictures and
a damaged shard among them) is killed at
random moments and at fault points, alone, as two workers, as more workers than shards, as
workers that take them by lease, or as twins on the same shards; it is
started again with other settings of speed until it ends by itself. Then its files must be equal,
byte by byte, to those of a run that nobody touched. After each kill, all that lies under a final
name must be complete.

With `--s3` the output lies in a store, which loses answers and is down for moments as well; the
untroubled run is on this disk, and the files must be equal all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.fault_points import STORE_POINTS, VARIABLE
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.output.folder import open_folder
from tests.commands import start
from tests.s3_server import S3Server

NUM_SHARDS = 4
SAMPLES = 40
KINDS = ("tar", "parquet", "folder")
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
SECONDS = (0.3, 1.5)  # after its start a process is killed


@dataclass
class Tally:
    """What was done, and what was found wrong."""

    kills: int = 0
    starts: int = 0
    jobs: int = 0
    rows: int = 0  # compared
    uploads: int = 0  # that a killed process had left at the end of a job, and that were aborted
    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass
class Torture:
    """One folder of shards, and jobs over them."""

    folder: Path
    seed: int = 0
    num_captions: int = 1
    is_deduping: bool = False
    server: S3Server | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        (self.folder / "shards").mkdir(parents=True)
        kinds = [*KINDS, *self._random.choices(KINDS, k=NUM_SHARDS - len(KINDS))]
        self._random.shuffle(kinds)
        self._shards = [self._write(number, kind) for number, kind in enumerate(kinds)]
        self._shards.append(self._write_damaged(self._random.choice(["tar", "parquet"])))
        process = start(self._arguments("untroubled", speed=[]), self.folder)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1, errors  # the damaged shard
        untroubled = _contents(self.folder / "untroubled")
        self._wanted = _files(untroubled)
        self._wanted_pieces = _piece_rows(untroubled)
        assert len(self._wanted) == NUM_SHARDS
        assert self._wanted_pieces

    def run(self, num_kills: int) -> Tally:
        """Start and kill until `num_kills` processes were killed, and the last job ended."""
        while self.tally.kills < num_kills:
            out = f"out-{self.tally.jobs}"
            while not self._is_finished(out):
                self._attempt(out, may_kill=self.tally.kills < num_kills)
            self._compare(out)
            if self.server is not None:
                self._check_uploads(self.server, out)
            shutil.rmtree(self.folder / out, ignore_errors=True)
            self.tally.jobs += 1
        return self.tally

    def _attempt(self, out: str, *, may_kill: bool) -> None:
        """Run one set of processes, and kill some of them."""
        kinds = ["alone", "workers", "twins", "slices", "claims", "claims"]
        # In a store the last ones take minutes on a small machine: many processes, many requests.
        kind = self._random.choice(kinds if self.server is None else kinds[:3])
        ranks = {
            "alone": [(0, 1)],
            "workers": [(0, 2), (1, 2)],
            "slices": [(rank, 7) for rank in range(7)],  # more than shards: each is cut
            "twins": [(0, 1)] * 2,
            "claims": [(rank, 3) for rank in range(3)],
        }[kind]
        claim = ["--claim", "--lease-seconds=1"] if kind == "claims" else []
        processes = [self._start(out, rank, size, may_kill, claim) for rank, size in ranks]
        if self.server is not None and may_kill:
            self.server.lose_replies = self._random.choice([0, 0, 1, 2])
            self.server.refusals = self._random.choice([0, 0, 3])
        for process in processes:
            if may_kill and self._random.random() < 0.8:
                self._kill_later(process)
        for process in processes:
            _, errors = process.communicate(timeout=120)
            if process.returncode == -signal.SIGKILL:
                self.tally.kills += 1
            elif process.returncode not in (0, 1, 75, -signal.SIGTERM):  # the last: no handler yet
                self.tally.faults.append(f"{kind}: exit {process.returncode}: {errors[-500:]}")
            self.tally.ended[str(process.returncode)] += 1
        self._check_complete(out)

    def _start(
        self, out: str, rank: int, world_size: int, may_kill: bool, claim: list[str]
    ) -> subprocess.Popen[str]:
        speed = [
            *claim,
            f"--slots={self._random.choice([4, 8, 64])}",
            f"--prefill-batch={self._random.choice([1, 3, 16])}",
            f"--loader-workers={self._random.randint(1, 4)}",
            f"--commit-rows={self._random.choice([1, 5, 13, 1000])}",
            f"--rank={rank}",
            f"--world-size={world_size}",
        ]
        extra = {}
        if self.server is not None:
            extra = {**self.server.environment(), "CAPTIONJOB_PART_BYTES": "3000"}
        if may_kill and self._random.random() < 0.5:
            extra[VARIABLE] = f"{self._random.choice(STORE_POINTS)}:{self._random.randint(1, 8)}"
        self.tally.starts += 1
        where = out if self.server is None else f"s3://bucket/{out}"
        return start(self._arguments(where, speed), self.folder, extra)

    def _kill_later(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._random.uniform(*SECONDS))
        number = signal.SIGTERM if self._random.random() < 0.15 else signal.SIGKILL
        process.send_signal(number)

    def _arguments(self, out: str, speed: list[str]) -> list[str]:
        shuffle = self._random.randint(1, 99)
        return [
            *("run", "--out", out, "--key-column", "key"),
            *(word for shard in self._shards for word in ("--shards", shard)),
            *("--model", f"scripted:shuffle={shuffle},latency=0.01,fail=unlucky"),
            *("--num-captions", str(self.num_captions)),
            *(["--temperature", "1"] if self.num_captions > 1 else []),
            *(["--dedupe"] if self.is_deduping else []),
            *("--keep", "txt"),
            *speed,
        ]

    def _write(self, number: int, kind: str, name: str = "") -> str:
        """Write a shard of a kind; return its path in the folder."""
        path = f"shards/{name or number}" + ("" if kind == "folder" else f".{kind}")
        members = self._members(number)
        if kind == "tar":
            (self.folder / path).write_bytes(make_tar_bytes(members))
        elif kind == "parquet":
            _write_table(self.folder / path, members)
        else:
            (self.folder / path).mkdir()
            for member, data in members:
                (self.folder / path / member).write_bytes(data)
        return path

    def _write_damaged(self, kind: str) -> str:
        """Write a tar cut in its middle, or a Parquet file whose later pages are not as written."""
        path = self._write(NUM_SHARDS, kind, "cut")
        data = bytearray((self.folder / path).read_bytes())
        place = len(data) // 2
        if kind == "tar":
            del data[place:]
        else:
            data[place : place + 2000] = bytes(2000)
        (self.folder / path).write_bytes(data)
        return path

    def _members(self, number: int) -> list[tuple[str | tarfile.TarInfo, bytes]]:
        """Return pictures with texts, one of them broken, one that the captioner fails on.

        For --dedupe every third picture, from the first to the last, is one of four.
        """
        members: list[tuple[str | tarfile.TarInfo, bytes]] = []
        for index in range(SAMPLES + number):
            key = f"{number}-{index:03d}" + ("-unlucky" if index == 7 else "")
            is_double = self.is_deduping and index % 3 == 0
            data = make_image_bytes(seed=index % 4 if is_double else 1000 * number + 100 + index)
            members.append((f"{key}.jpg", data[:40] if index == 11 else data))
            members.append((f"{key}.txt", f"text of {key}".encode()))
        return members

    def _is_finished(self, out: str) -> bool:
        found = self._now(out)
        return set(_files(found)) == set(self._wanted) and _piece_rows(found) == self._wanted_pieces

    def _check_uploads(self, server: S3Server, out: str) -> None:
        """Start a run's cleaning up: no upload of a dead process that has a note may be left."""
        noted = _noted(self._now(out))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment().items():
                patch.setenv(name, value)
            open_folder(f"s3://bucket/{out}").prepare()
        left = noted & server.uploads.keys()
        if left or _noted(self._now(out)):
            self.tally.faults.append(f"{len(left)} of {len(noted)} uploads were left")
        self.tally.uploads += len(noted)

    def _now(self, out: str) -> dict[str, bytes]:
        if self.server is not None:
            return self.server.files(f"bucket/{out}")
        return _contents(self.folder / out)

    def _check_complete(self, out: str) -> None:
        for name, data in self._now(out).items():
            if name.endswith(".parquet"):
                try:
                    pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
                except Exception as error:  # whatever the reader says of it
                    self.tally.faults.append(f"{out}/{name} is not complete: {error}")

    def _compare(self, out: str) -> None:
        contents = self._now(out)
        found = _files(contents)
        for name, digest in self._wanted.items():
            if found.get(name) != digest:
                self.tally.faults.append(f"{out}/{name} differs from the untroubled run's")
            self.tally.rows += pq.read_metadata(io.BytesIO(contents[name])).num_rows
        aside = [name for name in contents if name.startswith("_aside/")]
        if aside:
            self.tally.faults.append(f"set aside: {aside}")


def _write_table(path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]]) -> None:
    """Write pictures and texts as rows."""
    rows = pa.table(
        {
            "image": pa.array([{"bytes": data, "path": None} for _, data in members[::2]], IMAGE),
            "key": [str(name).removesuffix(".jpg") for name, _ in members[::2]],
            "txt": [text.decode() for _, text in members[1::2]],
        }
    )
    pq.write_table(
        rows,
        path,
        row_group_size=7,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )


def _noted(contents: dict[str, bytes]) -> set[str]:
    """Return the uploads that their writers left a note of."""
    names = [name for name in contents if name.startswith("_uploads/")]
    return {json.loads(contents[name])["upload"] for name in names}


def _contents(out: Path) -> dict[str, bytes]:
    """Return all files of a folder that have their names, by these."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def _files(contents: dict[str, bytes]) -> dict[str, str]:
    """Return the hash of each finished shard's file."""
    return {
        name: hashlib.sha256(data).hexdigest()
        for name, data in contents.items()
        if name.endswith(".parquet") and "/" not in name
    }


def _piece_rows(contents: dict[str, bytes]) -> list[tuple[object, ...]]:
    """Return the rows of the shards that cannot be finished, each once."""
    rows: set[tuple[object, ...]] = set()
    for name, data in contents.items():
        if name.startswith("_progress/cut-") and name.endswith(".parquet"):
            table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
            rows.update(tuple(row.values()) for row in table.to_pylist())
    return sorted(rows, key=lambda row: (row[1], row[2] if isinstance(row[2], int) else 0))


def torture(
    folder: Path,
    num_kills: int,
    seed: int,
    num_captions: int = 1,
    *,
    is_deduping: bool = False,
    is_on_s3: bool = False,
) -> Tally:
    """Run all of it and return what was found."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(S3Server(page=3)) if is_on_s3 else None
        tally = Torture(folder, seed, num_captions, is_deduping, server).run(num_kills)
    seconds = time.monotonic() - began
    print(
        f"{tally.kills} kills, {tally.starts} starts, {tally.jobs} jobs, {tally.rows} rows "
        f"compared in {seconds:.0f} s; exits {dict(tally.ended)}; {len(tally.faults)} faults"
    )
    return tally


def main() -> int:
    """Read the command line, run, print the faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-captions", type=int, default=1)
    parser.add_argument("--dedupe", action="store_true", help="and many identical pictures")
    parser.add_argument("--s3", action="store_true", help="write to a store")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "torture"
        tally = torture(
            place,
            asked.kills,
            asked.seed,
            asked.num_captions,
            is_deduping=asked.dedupe,
            is_on_s3=asked.s3,
        )
    print("\n".join(tally.faults))
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
