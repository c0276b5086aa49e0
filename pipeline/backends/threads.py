"""How many threads torch computes with: what was asked for, or what is measured to be fastest.

More threads are not always faster: a small network's products are over before a second thread
has begun, and cores may be hyper-threads, or lent to somebody else. So a small network is tried
with torch's own choice, then with half as many, and so on down while that is no slower. A large
one, of which a single picture takes long, gets torch's choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MAX_WEIGHTS = 50_000_000  # of a network that is tried
NUM_TRIES = 2  # of each number of threads; the faster one counts
MIN_GAIN = 1.05  # times as fast as torch's own choice; less is noise


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads were chosen, and what each number that was tried took."""

    chosen: int
    seconds: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = "1 thread" if self.chosen == 1 else f"{self.chosen} threads"
        others = [number for number in self.seconds if number != self.chosen]
        if not others:
            return text
        least = min(others, key=lambda number: self.seconds[number])
        ratio = self.seconds[least] / self.seconds[self.chosen]
        return f"{text} (measured: {ratio:.2f} times as fast as {least})"


def choose_threads(
    asked: int, device: torch.device, trial: Callable[[], object], *, is_small: bool
) -> Threads:
    """Set torch's threads, and say how many: `asked`, or for 0 those with the fastest trial."""
    if asked:
        torch.set_num_threads(asked)
    most = torch.get_num_threads()
    if asked or most == 1 or device.type != "cpu" or not is_small:
        return Threads(most)
    trial()  # the first one prepares what later ones find ready
    seconds = {most: _seconds(trial)}
    number = most // 2
    while number and seconds[min(seconds)] <= min(seconds.values()):
        torch.set_num_threads(number)
        seconds[number] = _seconds(trial)
        number //= 2
    fastest = min(seconds, key=lambda number: seconds[number])
    chosen = fastest if seconds[most] >= MIN_GAIN * seconds[fastest] else most
    torch.set_num_threads(chosen)
    return Threads(chosen, seconds)


def is_small_network(model: object) -> bool:
    """True for a network whose trial takes no time."""
    if not isinstance(model, torch.nn.Module):
        return False
    return sum(weights.numel() for weights in model.parameters()) <= MAX_WEIGHTS


def set_threads(number: int) -> None:
    """Let torch compute with so many threads."""
    torch.set_num_threads(number)


def num_threads() -> int:
    """Return how many threads torch computes with."""
    return torch.get_num_threads()


def _seconds(trial: Callable[[], object]) -> float:
    """Return the least time that a trial takes: others only add to it."""
    found = []
    for _ in range(NUM_TRIES):
        began = time.perf_counter()
        trial()
        found.append(time.perf_counter() - began)
    return min(found)
