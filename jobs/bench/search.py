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
IMAGES_PER_SLOT = 1.5  # that a trial has to get through
NUM_TRIALS = 6  # for which the time is divided, if each gets enough of it

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
    share: float = 0.0  # seconds of a trial, if all are to have their turn

    def run(self) -> Knobs:
        """Return the settings to take: those asked for, unless others are surely faster."""
        best = self.asked
        todo = list(neighbours(best.knobs, self.seen, self.limits))
        self.share = self._share(len(todo))
        done = {best.knobs}
        while todo:
            knobs = todo.pop(0)
            if knobs in done:
                continue
            done.add(knobs)
            if not self._has_time(knobs):
                self.untried.append(knobs)
                continue
            found = self._try(knobs)
            if found.images_per_second > MIN_GAIN * best.images_per_second:
                best = found  # and on from there
                todo = list(neighbours(best.knobs, self.seen, self.limits))
        return self._confirmed(best)

    def _confirmed(self, best: Tried) -> Knobs:
        """Run old and new once more, one after the other: the machine may have changed."""
        if best.knobs == self.asked.knobs:
            return best.knobs
        before, after = self._try(self.asked.knobs), self._try(best.knobs)
        is_faster = after.images_per_second > MIN_GAIN * before.images_per_second
        return best.knobs if is_faster else self.asked.knobs

    def _try(self, knobs: Knobs) -> Tried:
        found = Tried(knobs, self.measure(knobs, self._seconds(knobs)).images_per_second)
        self.tried.append(found)
        return found

    def _share(self, num_todo: int) -> float:
        left = self.deadline - time.monotonic()
        return left / (min(num_todo, NUM_TRIALS) + 2)  # and twice at the end

    def _seconds(self, knobs: Knobs) -> float:
        """Return how long a trial of these settings has to be."""
        enough = IMAGES_PER_SLOT * knobs.slots / max(self.asked.images_per_second, 1e-9)
        return max(enough, MIN_TRIAL_SECONDS, min(self.share, MAX_TRIAL_SECONDS))

    def _has_time(self, knobs: Knobs) -> bool:
        at_the_end = self._seconds(knobs) + self._seconds(self.asked.knobs)
        return time.monotonic() + self._seconds(knobs) + at_the_end <= self.deadline
