"""Memory in pages of 2 MiB, for weights that are read from end to end in every step.

In pages of 4 KiB, a processor waits for the places of pages as much as for what is in them: on a
virtual machine, reading goes a third faster with large ones.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
_LINE = 64


class LargePages:
    """Room for tensors that live about as long as each other, one behind the other."""

    def __init__(self, chunk_size: int = 64 << 20) -> None:
        """Ask for this many bytes at a time; what isn't written to takes no memory."""
        self._chunk_size = chunk_size
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is not initialised; plain memory where there is no other."""
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = -(-size // _LINE) * _LINE
        if whole > self._left.numel():
            self._left = _mapped(max(whole, self._chunk_size))
        taken, self._left = self._left[:size], self._left[whole:]
        return taken.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = mmap.mmap(-1, size + LARGE_PAGE, flags=private)
    try:
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(size, dtype=torch.uint8)
    memory = torch.frombuffer(room, dtype=torch.uint8)
    start = -memory.data_ptr() % LARGE_PAGE
    return memory[start : start + size]
