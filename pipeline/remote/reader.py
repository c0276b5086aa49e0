"""A remote object as a file: what arrives is exactly its bytes, or a ShardError says why not.

    open at byte 0 ──► 3.1 MB ──► cut ──► pause ──► open at byte 3.1 M, same version ──► ... end

An attempt that brings 128 KiB pays for the failures before it; so a shard is given up when
`Patience.attempts` in a row brought next to nothing, and a large shard outlives any number of cuts.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pipeline.errors import ShardError
from pipeline.remote.faults import RemoteError
from pipeline.remote.objects import Body, RemoteObject, Version, object_at
from pipeline.remote.patience import Patience

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PROGRESS_BYTES = 1 << 17  # that forgive the failures before them
MAX_READ_BYTES = 1 << 20
MIN_BYTES_PER_SECOND = 1024  # over the time that a stall may take: less is one
READ_THROUGH_BYTES = 1 << 20  # a shorter jump is read over: a new request costs more

Found = TypeVar("Found")
Note = Callable[[str], None]


def open_remote(
    url: str, *, stamp: tuple[int, int] | None = None, note: Note | None = None
) -> RemoteFile:
    """Open a full url as a file; ShardError where none is there, or one of another `stamp`."""
    patience = Patience.from_environment()
    remote = object_at(url, patience)
    version = version_of(remote, patience, note)
    if stamp is not None and version.stamp != stamp:
        raise ShardError(remote.url, "changed between two looks at it; a rerun reads it anew")
    return RemoteFile(remote, version, patience, note=note)


def version_of(remote: RemoteObject, patience: Patience, note: Note | None = None) -> Version:
    """Ask for an object's version, as often as patience allows; ShardError at last."""
    return Attempts(remote.url, patience, note).until_answered(remote.look)


def fetch(
    remote: RemoteObject,
    version: Version,
    begin: int,
    end: int,
    patience: Patience,
    note: Note | None = None,
) -> bytes:
    """Return the bytes from `begin` to `end` of one version; ShardError where they do not come.

    Of an object that does not tell its size there may be fewer.
    """
    if version.size is None:
        with io.BufferedReader(RemoteFile(remote, version, patience, note=note)) as whole:
            return whole.read(end)[begin:]
    end = min(end, version.size)
    with RemoteFile(remote, version, patience, begin=begin, end=end, note=note) as file:
        return file.read()


class Attempts:
    """Counts failures in a row, waits between attempts, and at last raises ShardError."""

    def __init__(self, url: str, patience: Patience, note: Note | None = None) -> None:
        """Tell `note` of each failure that is tried again."""
        self.num_retries = 0
        self._url = url
        self._patience = patience
        self._note = note
        self._num_failures = 0  # in a row

    def until_answered(self, ask: Callable[[], Found]) -> Found:
        """Ask until there is an answer."""
        while True:
            try:
                return ask()
            except RemoteError as error:
                self.failed(error, "")

    def progressed(self) -> None:
        """Forget the failures so far."""
        self._num_failures = 0

    def failed(self, error: RemoteError, how_far: str) -> None:
        """Wait, if another attempt may help; else raise ShardError."""
        self._num_failures += 1
        attempts = self._patience.attempts
        if error.kind != "transient":
            words = {"changed": "the object changed while it was read; a rerun reads it anew"}
            raise ShardError(self._url, f"{words.get(error.kind, error.what)}{how_far}") from None
        told = f"{error.what}{how_far}, attempt {self._num_failures} of {attempts}"
        if self._num_failures >= attempts:
            raise ShardError(self._url, told) from None
        self.num_retries += 1
        if self._note is not None:
            self._note(f"{self._url}: {told}")
        time.sleep(self._patience.wait_after(self._num_failures, error.wait_seconds))


class RemoteFile(io.RawIOBase):
    """One version of a remote object from `begin` to `end`, unbuffered and seekable."""

    def __init__(
        self,
        remote: RemoteObject,
        version: Version,
        patience: Patience,
        *,
        begin: int = 0,
        end: int | None = None,
        note: Note | None = None,
    ) -> None:
        """Ask for nothing yet: the first read opens."""
        super().__init__()
        self.version = version
        self._remote = remote
        self._attempts = Attempts(remote.url, patience, note)
        self._range_end = end
        self._end = end if end is not None else version.size
        self._position = begin  # of the next byte wanted
        self._body: Body | None = None
        self._body_position = 0  # of the next byte that the body gives
        self._num_fresh = 0  # bytes since the last failure
        self._pace = _Pace(patience.stall_seconds)

    @property
    def num_retries(self) -> int:
        """Attempts beyond the first."""
        return self._attempts.num_retries

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.version.size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move; the next read sees to it that the bytes come from there."""
        if whence != os.SEEK_SET and not (whence == os.SEEK_CUR or self.seekable()):
            raise io.UnsupportedOperation("the length is not known")
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.version.size or 0}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            wanted = min(len(view), MAX_READ_BYTES)
            if self._end is not None:
                wanted = min(wanted, self._end - self._position)
            if wanted <= 0:
                return 0
            try:
                data = self._read_once(wanted)
            except RemoteError as error:
                self._let_go()
                self._num_fresh = 0
                self._attempts.failed(error, self._how_far())
                continue
            view[: len(data)] = data
            return len(data)

    def close(self) -> None:
        """Let the connection go."""
        self._let_go()
        super().close()

    def _read_once(self, wanted: int) -> bytes:
        """Return the next bytes, ``b""`` at an end that is known to be one."""
        body = self._body_here()
        began = time.monotonic()
        data = body.read(wanted)
        self._pace.count(time.monotonic() - began, len(data))
        self._body_position += len(data)
        self._position = self._body_position
        self._num_fresh += len(data)
        if self._num_fresh >= PROGRESS_BYTES:
            self._attempts.progressed()
        if not data and self._end is not None:
            raise RemoteError("transient", "the connection ended early")
        return data

    def _body_here(self) -> Body:
        """Return a body whose next byte is the wanted one: the open one, if it is not far."""
        gap = self._position - self._body_position
        if self._body is not None and not 0 <= gap <= READ_THROUGH_BYTES:
            self._let_go()
        if self._body is None:
            self._body = self._remote.open(self._position, self._range_end, self.version)
            self._body_position = self._position
        while self._body_position < self._position:
            passed = self._body.read(min(self._position - self._body_position, MAX_READ_BYTES))
            if not passed:
                raise RemoteError("transient", "the connection ended early")
            self._body_position += len(passed)
        return self._body

    def _let_go(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def _how_far(self) -> str:
        size = self.version.size
        return f" at byte {self._position} of {'unknown' if size is None else size}"


class _Pace:
    """Tells a trickle, which no time-out of a socket notices, by the time spent in reads alone."""

    def __init__(self, window_seconds: float) -> None:
        self._window = window_seconds
        self._seconds = 0.0
        self._bytes = 0

    def count(self, seconds: float, num_bytes: int) -> None:
        self._seconds += seconds
        self._bytes += num_bytes
        if self._seconds < self._window:
            return
        rate = self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        if rate < MIN_BYTES_PER_SECOND:
            raise RemoteError("transient", f"it trickles ({rate:.0f} bytes a second)")
