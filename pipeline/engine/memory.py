"""Out of memory: told from other errors, and answered by running less at a time."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = "out_of_memory"


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if torch could not get the memory it asked for, on any device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    # The allocators of processors and of Apple's GPUs raise plain RuntimeErrors.
    return "can't allocate memory" in text or "out of memory" in text.lower()
