"""What the job has done so far, to JSON lines while it runs and a table for people at the end.

Counters count this run's work alone and only ever grow; rows that an earlier run committed are
in `resumed_rows` and in no rate. `OUT/_throughput/<worker>.jsonl` gets one line an interval,
with `event` "interval", and one at the end, with `event` "end".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import JobError

THROUGHPUT = "_throughput"
MIN_SECONDS = 5.0  # in less, first calls and warm-up outweigh everything


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters at one moment; seconds are wall time of the worker's main loop."""

    seconds: float = 0.0  # since captioning started, the loading of weights left out
    images: int = 0
    rows: int = 0
    error_rows: int = 0
    resumed_rows: int = 0
    prompt_tokens: int = 0
    padding_tokens: int = 0
    new_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    busy_slot_steps: int = 0
    total_slot_steps: int = 0
    bytes_read: int = 0
    waiting_seconds: float = 0.0  # the network had no live sequence and no request
    vision_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    writing_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Images whose rows this run made, over its wall time."""
        return _ratio(self.images, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Caption tokens over wall time."""
        return _ratio(self.new_tokens, self.seconds)

    @property
    def padding_share(self) -> float:
        """Share of prefill columns that hold no prompt."""
        return _ratio(self.padding_tokens, self.padding_tokens + self.prompt_tokens)

    @property
    def slots_busy(self) -> float:
        """Share of slot-steps in which a sequence was live."""
        return _ratio(self.busy_slot_steps, self.total_slot_steps)

    def share(self, seconds: float) -> float:
        """Return a stage's share of the wall time."""
        return min(1.0, _ratio(seconds, self.seconds))


class ThroughputLog:
    """Appends snapshots to a worker's file; each line is complete or absent."""

    def __init__(self, out: Path, worker: str) -> None:
        """Open `OUT/_throughput/<worker>.jsonl`."""
        folder = out / THROUGHPUT
        self._worker = worker
        self._path = folder / f"{worker}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)  # so that closing has nothing to write
        except OSError as error:
            raise self._failure(error) from error

    def write(self, snapshot: Snapshot, event: str, now: float) -> None:
        """Write one line; `now` is the time since 1970 in seconds."""
        counters = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(snapshot).items()
        }
        line = {"event": event, "time": round(now, 3), "worker": self._worker, **counters}
        data = (json.dumps(line) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _failure(self, error: OSError) -> JobError:
        return JobError(f"{self._path} cannot be written: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The speed settings that a verdict can ask to change."""

    loader_workers: int
    slots: int
    prefill_batch: int
    commit_rows: int


def verdict(snapshot: Snapshot, tuning: Tuning) -> str:
    """Say in one line what bounds the job, and what to change."""
    waiting = snapshot.share(snapshot.waiting_seconds)
    writing = snapshot.share(snapshot.writing_seconds)
    if not snapshot.images:
        return "nothing was captioned in this run"
    if snapshot.seconds < MIN_SECONDS:
        return "too short a run to say what bounds it"
    if waiting > 0.15 and waiting >= writing:
        return (
            f"loader-bound: the network waited {waiting:.0%} of the time; "
            f"try --loader-workers {tuning.loader_workers * 2}"
        )
    if writing > 0.15:
        return (
            f"writer-bound: {writing:.0%} of the time went into writing; "
            f"try --commit-rows {tuning.commit_rows * 4}, or a faster disk"
        )
    stages = {
        "vision": snapshot.share(snapshot.vision_seconds),
        "prefill": snapshot.share(snapshot.prefill_seconds),
        "decode": snapshot.share(snapshot.decode_seconds),
    }
    stage = max(stages, key=lambda name: stages[name])
    return (
        f"network-bound, {stages[stage]:.0%} of it in {stage}; {_advice(stage, snapshot, tuning)}"
    )


def _advice(stage: str, snapshot: Snapshot, tuning: Tuning) -> str:
    if stage == "decode" and snapshot.slots_busy > 0.8:
        return f"try --slots {tuning.slots * 2} if memory allows"
    if stage == "decode":
        return (
            f"slots were busy {snapshot.slots_busy:.0%}; fewer --slots would do for so few images"
        )
    if stage == "prefill" and snapshot.padding_share > 0.3:
        padding = f"{snapshot.padding_share:.0%} of prefill was padding"
        return f"{padding}; try --prefill-batch {max(1, tuning.prefill_batch // 2)}"
    if stage == "prefill":
        return "a shorter --prompt, or a faster device"
    return "a faster device, or --dtype bfloat16 where the device has it"


def table(snapshot: Snapshot, tuning: Tuning) -> list[str]:
    """Return the last line's numbers as lines for people, the verdict last."""
    cells = (
        ("images/s", f"{snapshot.images_per_second:.1f}"),
        ("tokens/s", f"{snapshot.tokens_per_second:.0f}"),
        ("waiting", f"{snapshot.share(snapshot.waiting_seconds):.0%}"),
        ("vision", f"{snapshot.share(snapshot.vision_seconds):.0%}"),
        ("prefill", f"{snapshot.share(snapshot.prefill_seconds):.0%}"),
        ("decode", f"{snapshot.share(snapshot.decode_seconds):.0%}"),
        ("writing", f"{snapshot.share(snapshot.writing_seconds):.0%}"),
        ("padding", f"{snapshot.padding_share:.0%}"),
        ("slots busy", f"{snapshot.slots_busy:.0%}"),
    )
    widths = [max(len(name), len(value)) for name, value in cells]
    return [
        "  ".join(name.rjust(width) for (name, _), width in zip(cells, widths, strict=True)),
        "  ".join(value.rjust(width) for (_, value), width in zip(cells, widths, strict=True)),
        verdict(snapshot, tuning),
    ]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
