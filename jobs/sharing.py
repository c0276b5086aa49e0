"""How the workers of one machine share its cores and devices."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jobs.ranks import Place


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loaders_of(place: Place) -> int:
    """Return how many threads read and open images: one a core of this worker's, 2 to 8."""
    return max(2, min(8, num_cores() // place.local_size))


def threads_of(place: Place, environ: Mapping[str, str]) -> int:
    """Return torch's threads, 0 for its own choice: with others here, a share of the cores.

    torchrun sets OMP_NUM_THREADS=1 for its workers, whatever the machine has, so that a one is
    nobody's wish; another number is the user's.
    """
    if place.local_size == 1 or environ.get("OMP_NUM_THREADS", "1") != "1":
        return 0
    return max(1, num_cores() // place.local_size)


def device_of(device: str, place: Place) -> str:
    """Return the device to ask for: with others here, this worker's own of those visible."""
    if place.local_size > 1 and device in ("auto", "cuda"):
        return f"{device}@{place.local_rank}"
    return device
