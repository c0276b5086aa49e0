"""Room for the pixels of pictures that are open at the same time, shared by all loader threads.

    header read ──► claim(bytes): waits while there is no room ──► pixels decoded ──► prepared
                                                                       given back ◄──┘

File bytes say nothing of it: a white picture of 40 million pixels is 50 kB on disk and 480 MB
while it is opened. One that is larger than all the room is opened alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from PIL import Image

MAX_BYTES = 1 << 30
Claim = Callable[[int], None]

# Pillow holds 4 bytes for each pixel that is not grey. A plain picture is there as it was decoded,
# converted, and turned upright; others pass through RGBA, a mask and a background, or floats.
_PLAIN_MODES = ("1", "L", "P", "RGB", "YCbCr", "CMYK")
_PLAIN_BYTES, _OTHER_BYTES = 12, 24


def claim_nothing(num_bytes: int) -> None:
    """Claim no room, for pictures that are opened one at a time."""


def bytes_to_open(image: Image.Image) -> int:
    """Return about how many bytes a picture takes at most until it is upright RGB."""
    is_plain = image.mode in _PLAIN_MODES and "transparency" not in image.info
    return image.width * image.height * (_PLAIN_BYTES if is_plain else _OTHER_BYTES)


class PixelRoom:
    """Bounds the bytes that are claimed at the same time; safe on any number of threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Let at most `max_bytes` be claimed, or one claim that is larger."""
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._num_bytes = 0
        self.peak_bytes = 0

    @contextlib.contextmanager
    def visit(self) -> Iterator[Claim]:
        """Give a function that claims bytes, and give them back at the end of the block.

        Only a visit's first claim waits, so that no two visits ever wait for each other.
        """
        claimed = 0

        def claim(num_bytes: int) -> None:
            nonlocal claimed
            self._take(num_bytes, can_wait=not claimed)
            claimed += num_bytes

        try:
            yield claim
        finally:
            with self._changed:
                self._num_bytes -= claimed
                self._changed.notify_all()

    def _take(self, num_bytes: int, *, can_wait: bool) -> None:
        with self._changed:
            if can_wait:
                self._changed.wait_for(
                    lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes
                )
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)
