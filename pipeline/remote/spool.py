"""Remote shards fetched ahead to a disk, so that the network and the captioner work at once.

    store ──► shard 3, being read   [seg][seg][seg].....      read segments are freed
          ──► shard 4, fetched ahead [seg][seg]................  while 3 is read

Bytes lie in files that have no name any more, so nothing is left whatever ends the process. A
shard ahead waits while the spool is full; the one being read may always go on by one segment, so
that a shard larger than the spool still passes through it.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from pipeline.errors import RequestError, ShardError
from pipeline.records import Shard
from pipeline.remote.reader import Note, open_remote

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SEGMENT_BYTES = 16 << 20
CHUNK = 1 << 18

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where remote shards are put, how much of them at most, and how many are fetched at once."""

    folder: Path
    max_bytes: int = 4 << 30
    max_shards: int = 2  # the one being read among them

    def __post_init__(self) -> None:
        """Check the numbers; RequestError names the option."""
        if self.max_bytes < SEGMENT_BYTES:
            raise RequestError(
                f"--spool-bytes {self.max_bytes}: wanted {SEGMENT_BYTES} or more, and rather "
                "the size of a shard or two"
            )
        if self.max_shards < 1:
            raise RequestError(f"--spool-shards {self.max_shards}: wanted 1 or more")

    def check(self) -> None:
        """Raise RequestError unless a file can be made in the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise RequestError(
                f"--spool {self.folder}: {error.strerror or error}; wanted a folder for files"
            ) from None


@dataclass(slots=True)
class _Segment:
    file: BinaryIO
    begin: int  # in the shard
    size: int = 0

    def is_behind(self, position: int) -> bool:
        """True once it is full, and nobody will read in it again."""
        return self.size >= SEGMENT_BYTES and position >= self.begin + self.size


@dataclass(slots=True)
class _Fetch:
    """One shard on its way to the disk."""

    shard: Shard
    stamp: Stamp | None = None  # once the store has answered
    segments: deque[_Segment] = field(default_factory=deque)
    num_written: int = 0
    is_read: bool = False  # a reader waits for it
    is_over: bool = False  # no more bytes come
    is_dropped: bool = False
    error: Exception | None = None

    @property
    def num_held(self) -> int:
        return sum(segment.size for segment in self.segments)


class Spool:
    """Fetches the shards that are told to it, in their order; safe to close at any moment."""

    def __init__(
        self, settings: SpoolSettings, shards: Sequence[Shard], note: Note | None = None
    ) -> None:
        """Take note of what will be read; nothing is fetched before `start`."""
        self._settings = settings
        self._waiting = deque(shards)
        self._note = note
        self._fetches: dict[str, _Fetch] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def num_held(self) -> int:
        """Bytes on the disk."""
        with self._changed:
            return self._held()

    def start(self) -> None:
        """Begin to fetch."""
        with self._changed:
            self._fill()

    def open(self, shard: Shard, stamp: Stamp | None = None) -> BinaryIO | None:
        """Return a shard as it comes from the spool, or None where what comes is another one.

        A shard that was not announced is begun with at once.
        """
        with self._changed:
            if shard.id not in self._fetches:
                self._waiting = deque(one for one in self._waiting if one.id != shard.id)
                self._begin(shard)
            fetch = self._fetches[shard.id]
            fetch.is_read = True
            self._changed.notify_all()
            while fetch.stamp is None and not fetch.is_over:
                self._changed.wait()
            if fetch.stamp is None or (stamp is not None and fetch.stamp != stamp):
                self._drop(fetch)  # who opens it anew gets the version of now, or the error
                return None
        return cast(BinaryIO, _SpooledFile(self, fetch))

    def skip(self, shard: Shard) -> None:
        """Forget a shard that nobody will read."""
        with self._changed:
            self._waiting = deque(one for one in self._waiting if one.id != shard.id)
            if shard.id in self._fetches:
                self._drop(self._fetches[shard.id])

    def close(self) -> None:
        """Forget everything; threads end at their next byte."""
        with self._changed:
            self._is_closed = True
            for fetch in list(self._fetches.values()):
                self._drop(fetch)

    def read(self, fetch: _Fetch, position: int, wanted: int) -> bytes:
        """Return some bytes from a position on, waiting for them; ``b""`` at the end."""
        with self._changed:
            while True:
                while fetch.segments and fetch.segments[0].is_behind(position):
                    fetch.segments.popleft().file.close()
                    self._changed.notify_all()
                if fetch.segments:
                    segment = fetch.segments[0]
                    offset = position - segment.begin
                    assert offset >= 0, "a spooled shard is read forwards"
                    if offset < segment.size:
                        count = min(wanted, segment.size - offset)
                        return os.pread(segment.file.fileno(), count, offset)
                if fetch.error is not None:
                    raise fetch.error
                if fetch.is_over or fetch.is_dropped:
                    return b""
                self._changed.wait()

    def done_with(self, fetch: _Fetch) -> None:
        """Free what a reader has left, and let the next shard in."""
        with self._changed:
            self._drop(fetch)

    def _held(self) -> int:
        return sum(fetch.num_held for fetch in self._fetches.values())

    def _drop(self, fetch: _Fetch) -> None:
        fetch.is_dropped = True
        for segment in fetch.segments:
            segment.file.close()
        fetch.segments.clear()
        self._fetches.pop(fetch.shard.id, None)
        self._fill()
        self._changed.notify_all()

    def _fill(self) -> None:
        """Begin with further shards, as many as may be fetched at once."""
        while (
            not self._is_closed and self._waiting and len(self._fetches) < self._settings.max_shards
        ):
            self._begin(self._waiting.popleft())

    def _begin(self, shard: Shard) -> None:
        fetch = self._fetches[shard.id] = _Fetch(shard)
        name = f"spool-{shard.id}"
        threading.Thread(target=self._run, args=(fetch,), name=name, daemon=True).start()

    def _run(self, fetch: _Fetch) -> None:
        try:
            self._fetch(fetch)
        except ShardError as error:
            self._end(fetch, error)
        except OSError as error:  # the spool's disk
            what = f"the spool {self._settings.folder} failed: {error.strerror or error}"
            self._end(fetch, ShardError(fetch.shard.url, what))
        else:
            self._end(fetch, None)

    def _fetch(self, fetch: _Fetch) -> None:
        url = fetch.shard.address or fetch.shard.url
        with open_remote(url, note=self._note) as remote:
            with self._changed:
                fetch.stamp = remote.version.stamp
                self._changed.notify_all()
            while data := remote.read(CHUNK):
                if not self._put(fetch, data):
                    return

    def _put(self, fetch: _Fetch, data: bytes) -> bool:
        """Write down what came, once there is room; False if nobody wants it any more."""
        with self._changed:
            while not (fetch.is_dropped or self._has_room(fetch, len(data))):
                self._changed.wait()
            if fetch.is_dropped:
                return False
            last = fetch.segments[-1] if fetch.segments else None
            if last is None or last.size >= SEGMENT_BYTES:
                folder = self._settings.folder
                file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  freed later
                last = _Segment(cast(BinaryIO, file), fetch.num_written)
                fetch.segments.append(last)
            written = 0
            while written < len(data):
                place = last.size + written
                written += os.pwrite(last.file.fileno(), data[written:], place)
            last.size += len(data)
            fetch.num_written += len(data)
            self._changed.notify_all()
            return True

    def _has_room(self, fetch: _Fetch, num_bytes: int) -> bool:
        if self._held() + num_bytes <= self._settings.max_bytes:
            return True
        return fetch.is_read and fetch.num_held < SEGMENT_BYTES

    def _end(self, fetch: _Fetch, error: Exception | None) -> None:
        with self._changed:
            fetch.error = error
            fetch.is_over = True
            self._changed.notify_all()


class _SpooledFile(io.RawIOBase):
    """A shard as it lies in the spool, or comes to lie there, read once from its start."""

    def __init__(self, spool: Spool, fetch: _Fetch) -> None:
        super().__init__()
        self._spool = spool
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._spool.read(self._fetch, self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._spool.done_with(self._fetch)
        super().close()
