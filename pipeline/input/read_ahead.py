"""A file read in large gulps, whose unwanted stretches are sought past where it can seek.

After each jump only a little is read, and twice as much each time that it proves to be in
order: so the headers of a tar can be walked without reading the pictures between them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import BinaryIO

FIRST_BYTES = 1 << 12  # after a jump: a header, and perhaps a small field
MAX_BYTES = 1 << 20
MIN_JUMP = 1 << 14  # less is read faster than sought past


class ReadAhead(io.BufferedIOBase):
    """Buffer an unbuffered file; `skip` is what an `io.BufferedReader` lacks."""

    def __init__(self, file: BinaryIO, on_jump: Callable[[int], None]) -> None:
        """Read `file` from where it stands; `on_jump` is told of bytes that are sought past."""
        super().__init__()
        self._file = file
        self._on_jump = on_jump
        self._can_seek = file.seekable()
        self._buffer = b""
        self._at = 0  # in the buffer
        self._gulp = MAX_BYTES

    def readable(self) -> bool:
        """True."""
        return True

    def peek(self, size: int = 0) -> bytes:
        """Return some bytes that the next read will return, fewer than `size` only at the end."""
        while len(self._buffer) - self._at < size and (more := self._gulp_more()):
            self._buffer, self._at = self._buffer[self._at :] + more, 0
        return self._buffer[self._at : self._at + size]

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes, fewer only at the end."""
        wanted = -1 if size is None else size
        found = self._buffer[self._at :] if wanted < 0 else self._take(wanted)
        if wanted < 0:
            self._buffer, self._at = b"", 0
        parts = [found]
        left = wanted - len(found)
        while wanted < 0 or left > 0:
            more = self._gulp_more(left)
            if not more:
                break
            if wanted >= 0 and left < len(more):
                self._buffer, self._at = more, left
                more = more[:left]
            parts.append(more)
            left -= len(more)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, size: int) -> int:
        """Pass over up to `size` bytes; return how many there were, fewer only at the end."""
        passed = len(self._take(size))
        left = size - passed
        if self._can_seek and left >= MIN_JUMP:
            here = self._file.tell()
            jump = min(left, max(0, self._file.seek(0, os.SEEK_END) - here))
            self._file.seek(here + jump)
            self._on_jump(jump)
            self._gulp = FIRST_BYTES
            return passed + jump
        while left and (found := self.read(min(left, MAX_BYTES))):
            passed += len(found)
            left -= len(found)
        return passed

    def _take(self, size: int) -> bytes:
        found = self._buffer[self._at : self._at + size]
        self._at += len(found)
        return found

    def _gulp_more(self, least: int = 0) -> bytes:
        """Read the next gulp, or as much as is wanted at once."""
        gulp = max(self._gulp, min(least, MAX_BYTES))
        self._gulp = min(2 * self._gulp, MAX_BYTES)
        return self._file.read(gulp) or b""
