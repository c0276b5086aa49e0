"""A log of counters that only grow, kept small: an older line can go, and only detail is lost."""

from __future__ import annotations

MAX_BYTES = 128 << 10  # an interval's line is about 600: an hour at ten seconds


def thinned(data: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Drop every second line but the first and the last few, until so many bytes are left."""
    while len(data) > max_bytes:
        lines = data.splitlines(keepends=True)
        middle = lines[1:-4]
        if len(middle) < 2:
            return data
        data = b"".join([lines[0], *middle[1::2], *lines[-4:]])
    return data
