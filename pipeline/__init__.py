"""Stages of batch image captioning, from shards to rows.

The door for Python is `load_captioner("default").caption(["cat.jpg"])`, see `pipeline.door`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.door import Captions, load_captioner

__all__ = ["Captions", "load_captioner"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline import door  # late: the stages are used one by one, most without a network

    return getattr(door, name)
