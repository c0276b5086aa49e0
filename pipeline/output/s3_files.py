"""Files on their way to and from an S3 store."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from pipeline.errors import StoreDownError
from pipeline.output.thinning import thinned

TAIL_BYTES = 64 << 10  # a small file, or the footer of a large one, in one request
BLOCK_BYTES = 8 << 20

# Of (first byte, last byte or None, version): those bytes, the file's size and its version.
Fetch = Callable[[int, int | None, str], tuple[bytes, int, str]]


class S3Draft:
    """A nameless file of this machine: if the process dies, nothing is left of it."""

    def __init__(self) -> None:
        """Open it where temporary files go."""
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed by `close`)

    @contextlib.contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Give the file, empty."""
        yield self._file
        self._file.flush()

    @contextlib.contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """Give the file from its begin."""
        self._file.seek(0)
        yield self._file

    @property
    def size(self) -> int:
        """Bytes that were written."""
        return self._file.seek(0, io.SEEK_END)

    def part(self, start: int, num_bytes: int) -> bytes:
        """Return some bytes."""
        self._file.seek(start)
        return self._file.read(num_bytes)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class RangedFile(io.RawIOBase):
    """An object read by ranges, the end first, all of one version."""

    def __init__(self, fetch: Fetch) -> None:
        """Fetch the end; FileNotFoundError if there is no object."""
        self._fetch = fetch
        self._end, self._size, self._version = fetch(-TAIL_BYTES, None, "")
        self._block, self._block_start = b"", 0
        self._place = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the place in the file."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; nothing is fetched."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def read(self, size: int | None = -1, /) -> bytes:
        """Return all bytes that were asked for, or those up to the end."""
        stop = self._size if size is None or size < 0 else min(self._size, self._place + size)
        parts = []
        while self._place < stop:
            data = self._some(stop - self._place)
            self._place += len(data)
            parts.append(data)
        return b"".join(parts)

    def readinto(self, buffer: object, /) -> int:
        """Fill a buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _some(self, num_bytes: int) -> bytes:
        """Return one or more bytes from the place on."""
        end_start = self._size - len(self._end)
        if self._place >= end_start:
            start = self._place - end_start
            return self._end[start : start + num_bytes]
        offset = self._place - self._block_start
        if not 0 <= offset < len(self._block):
            last = min(end_start, self._place + max(num_bytes, BLOCK_BYTES)) - 1
            self._block, _, _ = self._fetch(self._place, last, self._version)
            self._block_start, offset = self._place, 0
        return self._block[offset : offset + num_bytes]


class S3Log:
    """A small file that is put anew, whole, with each line; older lines are thinned out."""

    def __init__(self, put: Callable[[bytes, bool], None]) -> None:
        """Write by `put`, whose second argument is whether it is worth waiting for the store."""
        self._put = put
        self._data = b""

    def append(self, data: bytes, *, is_last: bool) -> None:
        """Add lines; where the store is down they go with the next ones."""
        self._data = thinned(self._data + data)
        try:
            self._put(self._data, is_last)
        except StoreDownError:
            if is_last:
                raise

    def close(self) -> None:
        """Nothing is open."""
