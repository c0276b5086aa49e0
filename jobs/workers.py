"""The workers of a job, as their throughput files tell: how fast now, how fast over the run.

Only the head and the tail of each file are read, so that looking costs the same all day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

from pipeline.output.folder import OutFolder, Where, open_folder
from pipeline.throughput import THROUGHPUT, Snapshot

TAIL_BYTES = 1 << 14
STALLED_SECONDS = 60.0  # lines come every ten
_THREADS = 16
_NAMES = tuple(field.name for field in fields(Snapshot))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a worker's file."""

    time: float  # seconds since 1970
    is_end: bool
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's run: its last line, the one before, and what it is doing."""

    name: str
    state: str  # running | ended | stalled | replaced
    last: Line
    before: Line | None
    silent_seconds: float

    @property
    def rank(self) -> str:
        """Which worker of the job this is."""
        return self.name.partition("-")[0]

    @property
    def rate_now(self) -> float:
        """Images a second that were captioned between the last two lines."""
        return self._lately.images_per_second

    @property
    def finished_now(self) -> float:
        """The same with the images that got the caption of an identical one."""
        return self._lately.finished_per_second

    @property
    def rate(self) -> float:
        """Images a second over the worker's run."""
        return self.last.snapshot.images_per_second

    @property
    def _lately(self) -> Snapshot:
        """What was done between the last two lines; nothing once it does not run."""
        if self.state != "running" or self.before is None:
            return Snapshot()
        return self.last.snapshot - self.before.snapshot


def read_workers(out: Where, now: float) -> tuple[Worker, ...]:
    """Return all workers that ever ran, by name; a rank that was started again is replaced."""
    folder = open_folder(out)
    names = log_names(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        tails = list(pool.map(lambda name: read_tail(folder, name), names))
    found = [(_worker_name(name), lines) for name, lines in zip(names, tails, strict=True) if lines]
    newest: dict[str, float] = {}
    for name, lines in found:
        rank = name.partition("-")[0]
        newest[rank] = max(newest.get(rank, 0.0), lines[-1].time)
    return tuple(_worker(name, lines, newest, now) for name, lines in found)


def log_names(out: OutFolder) -> list[str]:
    """Return the workers' files."""
    names = [name for name in out.names(THROUGHPUT) if name.endswith(".jsonl")]
    return [f"{THROUGHPUT}/{name}" for name in names]


def read_lines(out: OutFolder, name: str) -> list[Line]:
    """Return all lines of a worker's file; broken ones are left out."""
    return _parse(out.read(name))


def read_tail(out: OutFolder, name: str) -> list[Line]:
    """Return the last lines of a worker's file."""
    try:
        return _parse(out.read_tail(name, TAIL_BYTES))
    except OSError:
        return []


def _worker_name(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".jsonl")


def _worker(name: str, lines: Sequence[Line], newest: dict[str, float], now: float) -> Worker:
    last = lines[-1]
    silent = max(0.0, now - last.time)
    if last.is_end:
        state = "ended"
    elif newest[name.partition("-")[0]] > last.time:
        state = "replaced"
    else:
        state = "stalled" if silent > STALLED_SECONDS else "running"
    return Worker(name, state, last, lines[-2] if len(lines) > 1 else None, silent)


def _parse(data: bytes) -> list[Line]:
    lines = []
    for text in re.split(rb"\r?\n", data):
        try:
            found = json.loads(text)
            numbers = {name: found[name] for name in _NAMES if name in found}
            if all(isinstance(value, int | float) for value in numbers.values()):
                is_end = found["event"] == "end"
                lines.append(Line(float(found["time"]), is_end, Snapshot(**numbers)))
        except (ValueError, KeyError, TypeError):
            continue  # the first one of a tail is cut, the last one may be in writing
    return lines
