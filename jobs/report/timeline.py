"""The job's speed over time, summed over its workers, from their throughput files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.workers import Line, log_names, read_lines
from pipeline.output.folder import Where, open_folder
from pipeline.throughput import Snapshot

MAX_BINS = 120
STAGES = ("waiting", "vision", "prefill", "decode", "writing")
_COUNTERS = (
    *("images", "copied_images", "new_tokens", "seconds", "padding_tokens", "prompt_tokens"),
    *("busy_slot_steps", "total_slot_steps"),
    *(f"{stage}_seconds" for stage in STAGES),
)

Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Numbers for each slice of time; a slice in which nobody ran holds NaN."""

    seconds: Numbers  # since the first worker began, the middle of each slice
    images_per_second: Numbers
    stages: dict[str, Numbers]  # shares of the workers' time, 0 to 1
    slots_busy: Numbers
    padding: Numbers
    num_workers: int
    total: Snapshot  # of all workers' runs


def read_timeline(out: Where) -> Timeline | None:
    """Read all workers' files; None where nothing was recorded."""
    folder = open_folder(out)
    runs = [read_lines(folder, name) for name in log_names(folder)]
    steps = [step for lines in runs for step in _steps(lines)]
    if not steps:
        return None
    begin = min(start for start, _, _ in steps)
    end = max(stop for _, stop, _ in steps)
    width = _bin_width(end - begin, [stop - start for start, stop, _ in steps])
    num_bins = max(1, int(np.ceil((end - begin) / width)))
    sums: dict[str, Numbers] = {name: np.zeros(num_bins) for name in _COUNTERS}
    for start, stop, counts in steps:
        _spread(sums, counts, (start - begin) / width, (stop - begin) / width)
    return _timeline(sums, width, [lines for lines in runs if lines])


def _steps(lines: Sequence[Line]) -> list[tuple[float, float, dict[str, float]]]:
    """Return what was done between one line and the next: begin, end and counts."""
    if not lines:
        return []
    # The worker's own clock: a line is written some time after its numbers were read.
    begin = lines[-1].time - lines[-1].snapshot.seconds
    found = []
    for before, after in pairwise([Snapshot(), *(line.snapshot for line in lines)]):
        if after.seconds > before.seconds:
            counts = {
                name: max(0.0, getattr(after, name) - getattr(before, name)) for name in _COUNTERS
            }
            found.append((begin + before.seconds, begin + after.seconds, counts))
    return found


def _bin_width(span: float, steps: Sequence[float]) -> float:
    """Slices as wide as a usual interval, so that none is empty while somebody runs."""
    return max(span / MAX_BINS, float(np.median(steps)), 1e-3)


def _spread(sums: dict[str, Numbers], counts: dict[str, float], start: float, stop: float) -> None:
    """Add counts to the slices that they were made in, evenly over their time."""
    first, last = int(start), min(int(np.ceil(stop)), len(sums["images"]))
    for place in range(first, max(last, first + 1)):
        if place >= len(sums["images"]):
            return
        share = (min(stop, place + 1) - max(start, place)) / (stop - start)
        for name, count in counts.items():
            sums[name][place] += max(0.0, share) * count


def _timeline(sums: dict[str, Numbers], width: float, runs: Sequence[Sequence[Line]]) -> Timeline:
    num_bins = len(sums["images"])
    ran = sums["seconds"] > 0
    # In the last slice nobody may have run to its end: rates are per second that was run.
    share = np.minimum(1.0, sums["seconds"] / width)
    total = {name: sum(getattr(run[-1].snapshot, name) for run in runs) for name in _COUNTERS}
    return Timeline(
        seconds=(np.arange(num_bins) + 0.5) * width,
        images_per_second=_ratio(
            sums["images"] - sums["copied_images"], np.where(ran, width * share, 0)
        ),
        stages={
            stage: np.minimum(1.0, _ratio(sums[f"{stage}_seconds"], sums["seconds"]))
            for stage in STAGES
        },
        slots_busy=_ratio(sums["busy_slot_steps"], sums["total_slot_steps"]),
        padding=_ratio(sums["padding_tokens"], sums["padding_tokens"] + sums["prompt_tokens"]),
        num_workers=len(runs),
        total=Snapshot(**total),
    )


def _ratio(part: Numbers, whole: Numbers) -> Numbers:
    found: Numbers = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return found
