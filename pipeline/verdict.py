"""What bounds a job, in one sentence with one thing to try, from its counters.

A loader that is too slow shows in two ways: the network stands still, or it goes on with few
sequences, because requests come one by one. So both are looked at: the time that it waited, and
the time in which it was handed less than it asked for while slots were free.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.throughput import Snapshot

MIN_SECONDS = 5.0  # in less, first calls and warm-up outweigh everything
MUCH = 0.15  # of the time, in a stage that should take next to nothing
FULL_SLOTS = 0.8
MOSTLY_STARVED = 0.5
MUCH_PADDING = 0.3
BUSY_CORES = 0.85


@dataclass(frozen=True, slots=True)
class Tuning:
    """The speed settings that a verdict can ask to change, and what they run on."""

    loader_workers: int
    slots: int
    prefill_batch: int
    commit_rows: int
    dtype: str = ""  # of the network, where it is known
    cores: int = 0  # that this process may use; 0: not known


def verdict(snapshot: Snapshot, tuning: Tuning) -> str:
    """Say in one line what bounds the job, and what to change."""
    waiting = snapshot.share(snapshot.waiting_seconds)
    writing = snapshot.share(snapshot.writing_seconds)
    if not snapshot.images:
        return "nothing was captioned in this run"
    if snapshot.seconds < MIN_SECONDS:
        return "too short a run to say what bounds it"
    if waiting > MUCH and waiting >= writing:
        return f"loader-bound: the network waited {waiting:.0%} of the time; " + _load(
            snapshot, tuning
        )
    if writing > MUCH:
        return (
            f"writer-bound: {writing:.0%} of the time went into writing; "
            f"try --commit-rows {tuning.commit_rows * 4}, or a faster disk"
        )
    if is_starved(snapshot):
        return (
            f"loader-bound: slots were busy {snapshot.slots_busy:.0%}, for want of requests; "
            + _load(snapshot, tuning)
        )
    name, share = bound_stage(snapshot)
    return f"{name}-bound: {share:.0%} of the time in {name}; {_advice(name, snapshot, tuning)}"


def is_starved(snapshot: Snapshot) -> bool:
    """True if slots stayed free because requests came too slowly."""
    return (
        snapshot.share(snapshot.starved_seconds) > MOSTLY_STARVED
        and snapshot.slots_busy < FULL_SLOTS
    )


def bound_stage(snapshot: Snapshot) -> tuple[str, float]:
    """Return the stage of the network that took most, and its share of the time."""
    stages = {
        "vision": snapshot.share(snapshot.vision_seconds),
        "prefill": snapshot.share(snapshot.prefill_seconds),
        "decode": snapshot.share(snapshot.decode_seconds),
    }
    name = max(stages, key=lambda stage: stages[stage])
    return name, stages[name]


def _load(snapshot: Snapshot, tuning: Tuning) -> str:
    """What to do about a slow loader: threads help only where a core is free for them."""
    if tuning.cores and snapshot.share(snapshot.cpu_seconds / tuning.cores) > BUSY_CORES:
        cores = "the core is" if tuning.cores == 1 else f"all {tuning.cores} cores are"
        return f"{cores} busy, so smaller pictures would help, more loaders would not"
    return f"try --loader-workers {tuning.loader_workers * 2}"


def _advice(stage: str, snapshot: Snapshot, tuning: Tuning) -> str:
    if stage == "decode" and snapshot.slots_busy > FULL_SLOTS:
        return f"try --slots {tuning.slots * 2} if memory allows"
    if stage == "decode":
        return (
            f"slots were busy {snapshot.slots_busy:.0%}, there were too few requests to fill them"
        )
    if stage == "prefill" and snapshot.padding_share > MUCH_PADDING and tuning.prefill_batch > 1:
        padding = f"{snapshot.padding_share:.0%} of prefill was padding"
        return f"{padding}; try --prefill-batch {max(1, tuning.prefill_batch // 2)}"
    if stage == "prefill":
        return "try a shorter --prompt, or a faster device"
    if tuning.dtype == "float32":
        return "try a faster device, or --dtype bfloat16 where the device has it"
    return "try a faster device"


def cells_of(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return the numbers that people look at, each with its name."""
    cells = [
        ("images/s", f"{snapshot.images_per_second:.1f}"),
        ("tokens/s", f"{snapshot.tokens_per_second:.0f}"),
        ("waiting", f"{snapshot.share(snapshot.waiting_seconds):.0%}"),
        ("vision", f"{snapshot.share(snapshot.vision_seconds):.0%}"),
        ("prefill", f"{snapshot.share(snapshot.prefill_seconds):.0%}"),
        ("decode", f"{snapshot.share(snapshot.decode_seconds):.0%}"),
        ("writing", f"{snapshot.share(snapshot.writing_seconds):.0%}"),
        ("other", f"{snapshot.other_share:.0%}"),
        ("padding", f"{snapshot.padding_share:.0%}"),
        ("slots busy", f"{snapshot.slots_busy:.0%}"),
    ]
    if snapshot.copied_images:
        cells.insert(1, ("copied/s", f"{snapshot.copied_images / snapshot.seconds:.1f}"))
    return cells


def table(snapshot: Snapshot, tuning: Tuning) -> list[str]:
    """Return the last line's numbers as lines for people, the verdict last."""
    cells = cells_of(snapshot)
    widths = [max(len(name), len(value)) for name, value in cells]
    return [
        "  ".join(name.rjust(width) for (name, _), width in zip(cells, widths, strict=True)),
        "  ".join(value.rjust(width) for (_, value), width in zip(cells, widths, strict=True)),
        verdict(snapshot, tuning),
    ]
