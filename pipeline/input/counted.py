"""A shard's file that counts what is really read of it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class BytesRead(Protocol):
    """Where the bytes are counted."""

    bytes_read: int


class CountedFile(io.RawIOBase):
    """Count what is read from the file, so that a bar can move inside a member."""

    def __init__(self, file: BinaryIO, stats: BytesRead) -> None:
        """Read from `file`, which stays the caller's to close."""
        super().__init__()
        self._file = file
        self._stats = stats

    def readable(self) -> bool:
        """Return True: that is what it is for."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read what there is, as the file below does."""
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._stats.bytes_read += count or 0
        return int(count or 0)

    def seekable(self) -> bool:
        """Whether the file below can go to any place: a command's output cannot."""
        return self._file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place."""
        return self._file.tell()
