"""What the job has done so far, to JSON lines while it runs.

Counters count this run's work alone and only ever grow; rows that an earlier run committed are
in `resumed_rows` and in no rate. `OUT/_throughput/<worker>.jsonl` gets one line an interval,
with `event` "interval", and one at the end, with `event` "end".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from pipeline.errors import JobError
from pipeline.output.folder import OutFolder

THROUGHPUT = "_throughput"


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
    copied_images: int = 0  # of `images`: those that got the caption of an identical one
    starved_seconds: float = 0.0  # the network was handed less than it asked for
    cpu_seconds: float = 0.0  # of all threads of this process

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        """Return what was done between two moments."""
        names = [one.name for one in fields(self)]
        return Snapshot(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def __add__(self, other: Snapshot) -> Snapshot:
        """Return what was done in both."""
        names = [one.name for one in fields(self)]
        return Snapshot(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def images_per_second(self) -> float:
        """Images that the network captioned in this run, copies left out, over its wall time."""
        return _ratio(self.images - self.copied_images, self.seconds)

    @property
    def finished_per_second(self) -> float:
        """Images whose rows this run made, copies among them, over its wall time."""
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

    @property
    def other_share(self) -> float:
        """Share of the wall time that no stage accounts for."""
        stages = self.waiting_seconds + self.writing_seconds
        stages += self.vision_seconds + self.prefill_seconds + self.decode_seconds
        return max(0.0, 1 - _ratio(stages, self.seconds)) if self.seconds else 0.0

    def share(self, seconds: float) -> float:
        """Return a stage's share of the wall time."""
        return min(1.0, _ratio(seconds, self.seconds))


class ThroughputLog:
    """Appends snapshots to a worker's file; each line is complete or absent."""

    def __init__(self, out: OutFolder, worker: str) -> None:
        """Open `OUT/_throughput/<worker>.jsonl`."""
        name = f"{THROUGHPUT}/{worker}.jsonl"
        self._worker = worker
        self._place = out.place(name)
        try:
            self._file = out.log(name)
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
        try:
            self._file.append(data, is_last=event == "end")
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _failure(self, error: OSError) -> JobError:
        return JobError(f"{self._place} cannot be written: {error.strerror or error}")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
