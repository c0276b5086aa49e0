"""The job that every scenario runs, and its rows as one untroubled process makes them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.fixtures import make_photo_shard
from tests.commands import captionjob

Key = tuple[str, int, int]  # shard, index, caption


@dataclass(slots=True)
class Job:
    """Shards of small pictures, and the options with which they are captioned."""

    folder: Path
    num_shards: int = 16
    samples: int = 40
    latency: float = 0.1  # seconds a picture: a worker ends one a step
    _wanted: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "shards").mkdir(exist_ok=True)
        for number in range(self.num_shards):
            path = self.folder / "shards" / f"{number:03d}.tar"
            if not path.exists():
                make_photo_shard(path, self.samples + number % 5, seed=1000 * number)
        done = captionjob(*self.options("alone", latency=0.0), cwd=self.folder)
        if done.returncode:
            raise RuntimeError(f"the untroubled run failed: {done.stderr}")
        self._wanted, twice = _rows(self.folder / "alone")
        assert not twice

    def options(self, out: str, *, latency: float | None = None) -> list[str]:
        """Return the words of a run of this job, its paths absolute."""
        seconds = self.latency if latency is None else latency
        return [
            "run",
            *("--shards", str(self.folder / "shards")),
            *("--out", str(self.folder / out)),
            *("--model", f"scripted:latency={seconds}", "--slots", "4", "--keep", "txt"),
            *("--prefill-batch", "4", "--loader-workers", "2"),
            *("--commit-rows", "8", "--commit-seconds", "1", "--grace-seconds", "5"),
        ]

    @property
    def num_rows(self) -> int:
        """Rows of the whole job."""
        return len(self._wanted)

    def num_committed(self, out: str) -> int:
        """Return the rows that are there now, pieces among them."""
        paths = list((self.folder / out).glob("*.parquet"))
        folders: list[Path] = []
        with contextlib.suppress(FileNotFoundError):  # finished, and removed, this moment
            folders += (self.folder / out / "_progress").glob("*")
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                paths += folder.glob("[!.]*.parquet")
        count = 0
        for path in paths:
            try:
                count += int(pq.read_metadata(path).num_rows)
            except FileNotFoundError:
                continue  # finished, and its pieces removed, this moment
        return count

    def wait_for_rows(
        self,
        out: str,
        share: float,
        process: subprocess.Popen[str] | None = None,
        seconds: float = 120.0,
    ) -> None:
        """Wait until this share of the rows is committed; TimeoutError if it never is.

        RuntimeError, with its words, if the process that makes them ends before.
        """
        end = time.monotonic() + seconds
        while self.num_committed(out) < share * self.num_rows:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"exit {process.returncode}: {process.communicate()[1][-1500:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.num_committed(out)} rows after {seconds:.0f} s")
            time.sleep(0.1)

    def captioning_seconds(self, out: str) -> float:
        """Return how long all workers together captioned, as their throughput files say."""
        lines = [
            path.read_text().splitlines()[-1]
            for path in (self.folder / out / "_throughput").glob("*.jsonl")
            if path.stat().st_size
        ]
        return sum(float(json.loads(line)["seconds"]) for line in lines)

    def faults(self, out: str) -> list[str]:
        """Hold the finished rows of `out` against the untroubled ones, one by one."""
        found, twice = _rows(self.folder / out)
        lost = self._wanted.keys() - found.keys()
        foreign = found.keys() - self._wanted.keys()
        other = [
            key for key in found.keys() & self._wanted.keys() if found[key] != self._wanted[key]
        ]
        counts = (("lost", lost), ("foreign", foreign), ("other", other), ("twice", twice))
        return [f"{len(keys)} rows {name}, such as {min(keys)}" for name, keys in counts if keys]


def _rows(out: Path) -> tuple[dict[Key, dict[str, Any]], list[Key]]:
    """Return all rows under final names, and the keys that came twice."""
    rows: dict[Key, dict[str, Any]] = {}
    seen: Counter[Key] = Counter()
    for path in sorted(out.glob("*.parquet")):
        for row in pq.read_table(path, partitioning=None).to_pylist():
            key = (str(row["shard"]), int(row["index"]), int(row.get("caption_index") or 0))
            seen[key] += 1
            rows[key] = row
    return rows, [key for key, count in seen.items() if count > 1]
