"""The clock of all measurements: wall time, or processor time where the machine is shared.

Processor time of one thread leaves out what other programs take, and nothing else: with
`--threads 1 --clock cpu` ratios can be trusted beside other work. It says nothing of two threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_chosen = "wall"


def choose_clock(name: str) -> None:
    """Measure by this clock from now on."""
    global _chosen
    _chosen = name


def now() -> float:
    """Return seconds from an arbitrary moment."""
    return CLOCKS[_chosen]()


def clock_name() -> str:
    """Return the chosen clock's name, for workers."""
    return _chosen
