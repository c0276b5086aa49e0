"""The settings of speed that `bench` may change, and in which order it tries what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jobs.config import RunConfig
from pipeline.throughput import Snapshot
from pipeline.verdict import MUCH, bound_stage, is_starved

MOST = 1024  # slots and prompts of a prefill


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings that change the speed and no caption."""

    slots: int
    prefill_batch: int
    threads: int
    loader_workers: int

    @classmethod
    def of(cls, config: RunConfig, threads: int) -> Knobs:
        """Read them off a run's settings; `threads` are those that torch really has."""
        speed = config.speed
        return cls(speed.slots, speed.prefill_batch, threads, config.worker.loader_workers)

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a run with these settings."""
        speed = replace(
            config.speed,
            slots=self.slots,
            prefill_batch=self.prefill_batch,
            threads=self.threads,
        )
        worker = replace(config.worker, loader_workers=self.loader_workers)
        return replace(config, speed=speed, worker=worker)

    def words(self) -> list[str]:
        """Return them as options of `captionjob run`."""
        return [
            *("--slots", str(self.slots)),
            *("--prefill-batch", str(self.prefill_batch)),
            *("--threads", str(self.threads)),
            *("--loader-workers", str(self.loader_workers)),
        ]

    def changes(self, other: Knobs) -> str:
        """Say what another one changes."""
        words, others = self.words(), other.words()
        pairs = zip(others[::2], words[1::2], others[1::2], strict=True)
        return " ".join(f"{name} {new}" for name, old, new in pairs if old != new)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the settings may go here."""

    num_captions: int
    cores: int
    is_cpu: bool  # threads of torch matter where the network runs on the processor


def neighbours(knobs: Knobs, seen: Snapshot, limits: Limits) -> Iterator[Knobs]:
    """Yield settings one step away, those first that touch what bounds the job."""
    moves = {
        "loaders": [replace(knobs, loader_workers=knobs.loader_workers * 2)],
        "threads": [
            replace(knobs, threads=number)
            for number in (knobs.threads // 2, knobs.threads * 2)
            if limits.is_cpu and 1 <= number <= limits.cores
        ],
        "prefill": [
            replace(knobs, prefill_batch=number)
            for number in (knobs.prefill_batch // 2, knobs.prefill_batch * 2)
            if 1 <= number * limits.num_captions <= knobs.slots
        ],
        "slots": [
            replace(knobs, slots=number)
            for number in (knobs.slots * 2, knobs.slots // 2)
            if knobs.prefill_batch * limits.num_captions <= number <= MOST
        ],
    }
    for group in _order(seen):
        yield from moves[group]


def _order(seen: Snapshot) -> tuple[str, ...]:
    is_waiting = seen.share(seen.waiting_seconds) > MUCH or is_starved(seen)
    if is_waiting:
        return ("loaders", "threads")
    stage, _ = bound_stage(seen)
    if stage == "decode":
        return ("slots", "threads", "prefill", "loaders")
    return ("threads", "prefill", "slots", "loaders")
