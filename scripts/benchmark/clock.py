"""The clock of all measurements: wall time, or processor time where the machine is shared.

Processor time of one thread leaves out what other programs take, and nothing else: with
`--threads 1 --clock cpu` ratios can be trusted beside other work. It says nothing of two threads.
A GPU runs behind the program that calls it: the clock is read once it has caught up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_chosen = "wall"
_device = torch.device("cpu")


def choose_clock(name: str) -> None:
    """Measure by this clock from now on."""
    global _chosen
    _chosen = name


def measure_on(device: torch.device) -> None:
    """Wait for what was queued on this device whenever the clock is read."""
    global _device
    _device = device


def now() -> float:
    """Return seconds from an arbitrary moment."""
    if _device.type == "cuda":
        torch.cuda.synchronize(_device)
    return CLOCKS[_chosen]()


def clock_name() -> str:
    """Return the chosen clock's name, for workers."""
    return _chosen
