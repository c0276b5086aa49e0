"""Freed pixels go back to the system at once, instead of to each thread's own heap.

glibc's malloc learns from freed blocks: once a thread has freed one of Pillow's 16 MiB blocks,
blocks of that size come from that thread's heap and stay there. Eight loader threads that open
pictures of 40 million pixels, two at a time, so held 1.5 GB where 0.7 GB were in use. A fixed
threshold ends the learning. Smaller blocks keep coming from the heap, which is faster.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
MMAP_BYTES = 14 << 20  # below Pillow's blocks, and above a vision tower's (`PATCHES_AT_ONCE`)
TRIM_BYTES = 64 << 20  # the default of 128 kB, which a fixed threshold brings back, is slow


def give_back_freed_memory() -> bool:
    """Set malloc's thresholds for this process; False where there is no glibc."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))


def trim() -> bool:
    """Give back what is free now; False where there is no glibc, or there was nothing."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False
