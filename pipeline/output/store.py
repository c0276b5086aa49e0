"""Rows to Parquet: pieces of a shard while it is worked on, one file when it is whole.

A row is committed once its piece has its name: written under a hidden name, closed, flushed to
disk, its rows read back and counted, renamed, the folder flushed. The shard's file is made from
its pieces the same way, takes its name only if nobody was first, and then the pieces go. So a
crash at any instruction leaves each name with a complete file or none, and of two workers on
one shard the first to finish wins and the other's rows are dropped.

`pipeline.output.resume` reads back what lies there, and draws the folder.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import JobError, RequestError, ShardError
from pipeline.input.dealing import Slice
from pipeline.input.identity import ShardIdentity
from pipeline.output import resume
from pipeline.output.failures import note_failure
from pipeline.output.folder import OutFolder
from pipeline.output.job_record import JobRecord
from pipeline.output.open_shard import OpenShard
from pipeline.output.retry import RETRY
from pipeline.output.schema import RowSchema
from pipeline.records import Row, Shard


@dataclass(frozen=True, slots=True)
class CommitSettings:
    """A piece is committed each `rows` rows or `seconds` seconds, whichever comes first."""

    rows: int = 1000
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise RequestError(f"--commit-rows is {self.rows}; wanted 1 or more")
        if not self.seconds > 0:
            raise RequestError(f"--commit-seconds is {self.seconds}; wanted more than 0")


@dataclass(slots=True)
class StoreCounters:
    """What this run has handed to the store; the numbers only grow."""

    images: int = 0
    copied_images: int = 0  # of these: not captioned, but given an identical one's caption
    rows: int = 0
    error_rows: int = 0
    pieces: int = 0
    shards: int = 0  # whose file this run made
    writing_seconds: float = 0.0


class Claimed(Protocol):
    """Who is told what becomes of the slices that a worker took."""

    def finish(self, unit: Slice) -> None:
        """All rows of it are committed."""
        ...

    def fail(self, unit: Slice) -> None:
        """It cannot be read."""
        ...


class Store:
    """One worker's door to the output folder; safe on any thread."""

    def __init__(
        self,
        out: OutFolder,
        record: JobRecord,
        schema: RowSchema,
        settings: CommitSettings,
        worker: str,
        claims: Claimed | None = None,
    ) -> None:
        """Write for `worker`, a name that no other process has; `claims` are told of ends."""
        self.counters = StoreCounters()
        self.failed: dict[str, str] = {}  # shard id -> why
        self._out = out
        self._record = record
        self._schema = schema
        self._settings = settings
        self._worker = worker
        self._claims = claims
        self._open: dict[str, list[OpenShard]] = {}  # by shard id; several slices of one shard
        self._lost: set[str] = set()  # slices of shards that a twin finished under our hands
        self._num_pending = 0
        self._waiting_since = time.monotonic()  # of the oldest row that waits
        self._lock = threading.RLock()

    def begin(
        self, state: resume.ShardState, identity: ShardIdentity, mine: Slice | None = None
    ) -> None:
        """Take rows of a shard, or of a slice of it, from now on."""
        opened = OpenShard(
            shard=state.shard,
            identity=identity,
            out=self._out,
            record=self._record,
            schema=self._schema,
            committed=set(state.committed),
            mine=mine or Slice(state.shard),
            base=state.base,
        )
        with self._lock:
            self._open.setdefault(state.shard.id, []).append(opened)

    def add(self, row: Row) -> None:
        """Take one row, in any order; commit when enough wait."""
        with self._lock:
            self.counters.rows += 1
            self.counters.error_rows += row.status == "error"
            self.counters.images += row.caption_index == 0
            self.counters.copied_images += row.is_copy and row.caption_index == 0
            index = row.ref.index
            opened = self._find(row.ref.shard, index)
            if opened is None:
                return
            assert index not in opened.committed, f"{row.ref} came twice"
            assert index not in opened.pending, f"{row.ref} came twice"
            rows = opened.begun.setdefault(index, [])
            rows.append(row)
            if len(rows) < self._schema.num_captions:
                return
            opened.add(opened.begun.pop(index))
            if not self._num_pending:
                self._waiting_since = time.monotonic()
            self._num_pending += len(rows)
            if opened.is_complete:
                self._finish(opened)
            elif self._num_pending >= self._settings.rows:
                self.commit()
        self.commit_if_due()

    def end(self, slice_id: str, num_images: int) -> None:
        """Note that a slice's shard was read to its end, and how many images it has in all.

        Once all rows of the shard are here its file is made.
        """
        with self._lock:
            for opened in self._all_open():
                if opened.mine.id == slice_id:
                    opened.end(num_images)
                    if opened.is_complete:
                        self._finish(opened)
                    return
            assert slice_id in self._lost, f"{slice_id} was never begun"

    def fail(self, shard: Shard, error: ShardError, mine: Slice | None = None) -> None:
        """Note that a shard cannot be read to its end; what comes of it stays as pieces."""
        with self._lock, self._writing():
            self.failed[shard.id] = error.detail
            note_failure(self._out, shard, error)
        if self._claims is not None:
            self._claims.fail(mine or Slice(shard))

    def commit_if_due(self) -> None:
        """Commit if rows have waited for the set time."""
        with self._lock:
            waited = time.monotonic() - self._waiting_since
            if self._num_pending and waited >= self._settings.seconds:
                self.commit()

    def commit(self) -> None:
        """Commit every whole sample that waits."""
        with self._lock:
            for opened in self._all_open():
                if opened.pending:
                    self._commit_piece(opened)

    def close(self) -> None:
        """Commit what waits, and leave no empty folder behind."""
        self.commit()
        self._out.prune(resume.PROGRESS)
        self._out.prune(RETRY)

    def _all_open(self) -> list[OpenShard]:
        return [opened for slices in self._open.values() for opened in slices]

    def _find(self, shard_id: str, index: int) -> OpenShard | None:
        """Return the open slice that an image is in; None if a twin finished its shard."""
        for opened in self._open.get(shard_id, []):
            if index in opened.mine:
                return opened
        assert any(name.startswith(shard_id) for name in self._lost), f"{shard_id} is not open"
        return None

    def _commit_piece(self, opened: OpenShard) -> bool:
        """Commit what waits; False if a twin has finished the shard."""
        num_rows = opened.num_pending_rows
        with self._writing():
            is_written = opened.write_piece(f"{self.counters.pieces:05d}-{self._worker}.parquet")
        if is_written:
            self.counters.pieces += 1
            self._num_pending -= num_rows
            return True
        self._lost.add(opened.mine.id)
        with self._writing():
            opened.remove_pieces()
        self._close(opened)
        return False

    def _finish(self, opened: OpenShard) -> None:
        """Make the shard's file, then remove its pieces; of a slice, once all others are there."""
        if not opened.mine.is_whole:
            if opened.pending and not self._commit_piece(opened):
                return
            with self._writing():
                has_all = opened.has_all()
            if not has_all:
                self._close(opened)
                return
        try:
            with self._writing():
                is_first = opened.write_final()
                opened.remove_pieces()
        except ShardError as error:
            self.fail(opened.shard, error, opened.mine)
            return
        self.counters.shards += is_first
        self._close(opened)

    def _close(self, opened: OpenShard) -> None:
        self._num_pending -= opened.num_pending_rows
        slices = self._open[opened.shard.id]
        slices.remove(opened)
        if not slices:
            del self._open[opened.shard.id]
        if self._claims is not None:
            self._claims.finish(opened.mine)

    def _writing(self) -> _Writing:
        return _Writing(self.counters, self._out)


class _Writing:
    """Count the seconds, and explain what the disk says in one line."""

    def __init__(self, counters: StoreCounters, out: OutFolder) -> None:
        self._counters = counters
        self._out = out
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._counters.writing_seconds += time.perf_counter() - self._began
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise JobError(f"{self._out.url} cannot be written: {reason}") from error
