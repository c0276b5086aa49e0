"""What a worker of `run --workers` tells its parent: JSON lines through a pipe.

The throughput files say the same, every ten seconds and perhaps in an object store; a display
wants it twice a second, and the parent wants to know how each worker ended. A worker whose
parent is gone notices when it writes, and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jobs.display import Standing
from jobs.result import RunResult
from jobs.stopping import Stop
from pipeline.throughput import Snapshot

PIPE = "CAPTIONJOB_PIPE"  # the number of a file descriptor


class PipeDisplay:
    """Where a worker shows its progress if it has a parent."""

    def __init__(self, descriptor: int, stop: Stop) -> None:
        """Write to a pipe; `stop` is requested if nobody reads it any more."""
        self._descriptor = descriptor
        self._stop = stop

    def say(self, text: str) -> None:
        """Pass a line on."""
        self._send({"say": text})

    def show(self, standing: Standing) -> None:
        """Pass the numbers on."""
        self._send({"standing": asdict(standing)})

    def begin(self, worker: str) -> None:
        """Say under which name this worker takes leases."""
        self._send({"worker": worker})

    def end(self, result: RunResult) -> None:
        """Say how the run ended."""
        ending = {"errors": dict(result.errors), "failed": result.failed}
        self._send({"end": {**ending, "stopped": result.stopped}})

    def close(self) -> None:
        """Do nothing: the end of the process closes the pipe."""

    def _send(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._descriptor, (json.dumps(message) + "\n").encode())
        except OSError:  # whatever becomes of the numbers, captioning goes on to a clean stop
            self._stop.request("the end of its parent")


def pipe_of(environ: Mapping[str, str], stop: Stop) -> PipeDisplay | None:
    """Return the display of a worker that has a parent."""
    text = environ.get(PIPE, "")
    return PipeDisplay(int(text), stop) if text.isdigit() else None


@dataclass(slots=True)
class Report:
    """What one worker has told so far, over all its starts."""

    worker: str = ""
    standing: Standing | None = None
    before: Snapshot = field(default_factory=Snapshot)  # of starts that are over
    errors: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    said: list[str] = field(default_factory=list)

    def hear(self, line: bytes) -> None:
        """Take in one line; one that was cut by a death says nothing."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(line)
            if "say" in message:
                self.said.append(str(message["say"]))
            elif "worker" in message:
                self.worker = str(message["worker"])
            elif "standing" in message:
                found = message["standing"]
                self.standing = Standing(**{**found, "snapshot": Snapshot(**found["snapshot"])})
            elif "end" in message:
                self.errors.update(message["end"]["errors"])
                self.failed.update(message["end"]["failed"])
                self.stopped = str(message["end"]["stopped"])

    def restart(self) -> None:
        """Keep what the start that is over has done."""
        self.before = self.snapshot
        self.standing = None

    @property
    def snapshot(self) -> Snapshot:
        """All starts together."""
        return total([self.before, *([self.standing.snapshot] if self.standing else [])])


def total(snapshots: list[Snapshot], *, seconds: float | None = None) -> Snapshot:
    """Add snapshots up; with `seconds`, those of workers that ran side by side for so long.

    Then the seconds of their stages are divided, so that shares are those of an average worker.
    """
    sums: dict[str, Any] = {}
    for one in fields(Snapshot):
        found = sum(getattr(snapshot, one.name) for snapshot in snapshots)
        is_time = one.name.endswith("_seconds") and one.name != "cpu_seconds"
        sums[one.name] = found / max(1, len(snapshots)) if is_time and seconds else found
    if seconds is not None:
        sums["seconds"] = seconds
        sums["resumed_rows"] = max((one.resumed_rows for one in snapshots), default=0)
    return Snapshot(**sums)
