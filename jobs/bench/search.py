"""Which settings are faster: tried one step at a time, as long as there is time.

A trial says something only if slots fill and enough captions end in it; what the time does not
suffice for is named instead of guessed. A gain below the noise of such short runs counts for
nothing, and the settings found have to win against those asked for once more at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.bench.knobs import Knobs, Limits, neighbours
from pipeline.throughput import Snapshot

MIN_GAIN = 1.05
MIN_TRIAL_SECONDS = 2.0
MAX_TRIAL_SECONDS = 10.0
IMAGES_PER_SLOT = 2  # that a trial has to get through
NUM_TRIALS = 6  # for which the time is divided

Measure = Callable[[Knobs, float], Snapshot]


@dataclass(frozen=True, slots=True)
class Tried:
    """Settings, and the images a second that they gave."""

    knobs: Knobs
    images_per_second: float


@dataclass(slots=True)
class Search:
    """The settings tried so far, and the best of them."""

    measure: Measure
    limits: Limits
    deadline: float  # by time.monotonic
    asked: Tried
    seen: Snapshot  # of the settings asked for
    tried: list[Tried] = field(default_factory=list)
    untried: list[Knobs] = field(default_factory=list)  # for want of time

    def run(self) -> Knobs:
        """Return the settings to take: those asked for, unless others are surely faster."""
        best = self.asked
        todo = list(neighbours(best.knobs, self.seen, self.limits))
        seconds = self._trial_seconds(len(todo))
        done = {best.knobs}
        while todo:
            knobs = todo.pop(0)
            if knobs in done:
                continue
            done.add(knobs)
            if not self._has_time(knobs, seconds):
                self.untried.append(knobs)
                continue
            found = self._try(knobs, seconds)
            if found.images_per_second > MIN_GAIN * best.images_per_second:
                best = found  # and on from there
                todo = list(neighbours(best.knobs, self.seen, self.limits))
        return self._confirmed(best, seconds)

    def _confirmed(self, best: Tried, seconds: float) -> Knobs:
        """Run old and new once more, one after the other: the machine may have changed."""
        if best.knobs == self.asked.knobs:
            return best.knobs
        before = self._try(self.asked.knobs, seconds)
        after = self._try(best.knobs, seconds)
        is_faster = after.images_per_second > MIN_GAIN * before.images_per_second
        return best.knobs if is_faster else self.asked.knobs

    def _try(self, knobs: Knobs, seconds: float) -> Tried:
        found = Tried(knobs, self.measure(knobs, seconds).images_per_second)
        self.tried.append(found)
        return found

    def _trial_seconds(self, num_todo: int) -> float:
        left = self.deadline - time.monotonic()
        share = left / (min(num_todo, NUM_TRIALS) + 2)  # and twice at the end
        return min(MAX_TRIAL_SECONDS, max(MIN_TRIAL_SECONDS, share))

    def _has_time(self, knobs: Knobs, seconds: float) -> bool:
        enough = self.asked.images_per_second * seconds >= IMAGES_PER_SLOT * knobs.slots
        return enough and time.monotonic() + 3 * seconds <= self.deadline
