"""Rows to Parquet: pieces of a shard while it is worked on, one file when it is whole.

A row is committed once its piece has its name: written under a hidden name, closed, flushed to
disk, its rows read back and counted, renamed, the folder flushed. The shard's file is made from
its pieces the same way, takes its name only if nobody was first, and then the pieces go. So a
crash at any instruction leaves each name with a complete file or none, and of two workers on
one shard the first to finish wins and the other's rows are dropped.

`pipeline.resume` reads back what lies there, and draws the folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pipeline import commit, merge, resume
from pipeline.errors import JobError, RequestError, ShardError
from pipeline.failures import list_failures, note_failure
from pipeline.fault_points import reach
from pipeline.identity import ShardIdentity, stamp_of
from pipeline.job_record import JobRecord
from pipeline.records import Row, Shard
from pipeline.schema import RowSchema

_MAX_TRIES = 20


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
    rows: int = 0
    error_rows: int = 0
    pieces: int = 0
    shards: int = 0  # whose file this run made
    writing_seconds: float = 0.0


@dataclass(slots=True)
class _OpenShard:
    """A shard in work: what is committed of it, and what waits for the next piece."""

    shard: Shard
    identity: ShardIdentity
    committed: set[int]
    pending: dict[int, list[Row]] = field(default_factory=dict)  # whole samples, by index
    begun: dict[int, list[Row]] = field(default_factory=dict)  # samples that lack captions
    num_images: int | None = None  # once the reader came to the end

    @property
    def is_complete(self) -> bool:
        return self.num_images == len(self.committed) + len(self.pending)


class Store:
    """One worker's door to the output folder; safe on any thread."""

    def __init__(
        self,
        out: Path,
        record: JobRecord,
        schema: RowSchema,
        settings: CommitSettings,
        worker: str,
    ) -> None:
        """Write for `worker`, a name that no other process has."""
        self.counters = StoreCounters()
        self.failed: dict[str, str] = {}  # shard id -> why
        self._out = out
        self._record = record
        self._schema = schema
        self._settings = settings
        self._worker = worker
        self._open: dict[str, _OpenShard] = {}
        self._lost: set[str] = set()  # finished by a twin while we worked on them
        self._num_pending = 0
        self._waiting_since = time.monotonic()  # of the oldest row that waits
        self._lock = threading.RLock()

    def begin(self, state: resume.ShardState, identity: ShardIdentity) -> None:
        """Take rows of a shard from now on."""
        with self._lock:
            self._open[state.shard.id] = _OpenShard(state.shard, identity, set(state.committed))

    def add(self, row: Row) -> None:
        """Take one row, in any order; commit when enough wait."""
        with self._lock:
            self.counters.rows += 1
            self.counters.error_rows += row.status == "error"
            self.counters.images += row.caption_index == 0
            if row.ref.shard in self._lost:
                return
            opened = self._open[row.ref.shard]
            index = row.ref.index
            assert index not in opened.committed, f"{row.ref} came twice"
            assert index not in opened.pending, f"{row.ref} came twice"
            rows = opened.begun.setdefault(index, [])
            rows.append(row)
            if len(rows) < self._schema.num_captions:
                return
            opened.pending[index] = opened.begun.pop(index)
            if not self._num_pending:
                self._waiting_since = time.monotonic()
            self._num_pending += len(rows)
            if opened.is_complete:
                self._finish(opened)
            elif self._num_pending >= self._settings.rows:
                self.commit()
        self.commit_if_due()

    def end(self, shard_id: str, num_images: int) -> None:
        """Note that a shard was read to its end; once all its rows are here it is finished."""
        with self._lock:
            if shard_id in self._lost:
                return
            opened = self._open[shard_id]
            opened.num_images = num_images
            if opened.is_complete:
                self._finish(opened)

    def fail(self, shard: Shard, error: ShardError) -> None:
        """Note that a shard cannot be read to its end; what comes of it stays as pieces."""
        with self._lock, self._writing():
            self.failed[shard.id] = error.detail
            note_failure(self._out, shard, error)

    def commit_if_due(self) -> None:
        """Commit if rows have waited for the set time."""
        with self._lock:
            waited = time.monotonic() - self._waiting_since
            if self._num_pending and waited >= self._settings.seconds:
                self.commit()

    def commit(self) -> None:
        """Commit every whole sample that waits."""
        with self._lock:
            for opened in list(self._open.values()):
                if opened.pending:
                    self._commit_piece(opened)

    def close(self) -> None:
        """Commit what waits, and leave no empty folder behind."""
        self.commit()
        with contextlib.suppress(OSError):
            (self._out / resume.PROGRESS).rmdir()

    def _commit_piece(self, opened: _OpenShard) -> None:
        shard_id = opened.shard.id
        rows = [row for rows in opened.pending.values() for row in rows]
        name = f"{self.counters.pieces:05d}-{self._worker}.parquet"
        with self._writing():
            path = self._write_piece(shard_id, name, self._schema.table(rows), opened.identity)
        if path is None:
            self._lose(opened)
            return
        self.counters.pieces += 1
        self._num_pending -= len(rows)
        opened.committed.update(opened.pending)
        opened.pending.clear()

    def _write_piece(
        self, shard_id: str, name: str, table: pa.Table, identity: ShardIdentity
    ) -> Path | None:
        """Commit a table as a piece; None if a twin has finished the shard."""
        final = resume.final_path(self._out, shard_id)
        folder = resume.progress_folder(self._out, shard_id)
        for _ in range(_MAX_TRIES):
            if final.exists():
                return None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with commit.temporary_file(folder, name) as temporary:
                    commit.write_parquet(
                        temporary, self._arrow(identity), [table], "piece-half-written"
                    )
                    reach("piece-written")
                    temporary.rename(folder / name)
                commit.sync_folder(folder)
            except FileNotFoundError:
                continue  # the folder went: a twin finishes this very moment
            reach("piece-committed")
            if not final.exists():
                return folder / name
            (folder / name).unlink(missing_ok=True)
        raise JobError(f"{folder} vanishes whenever a piece is written there")

    def _finish(self, opened: _OpenShard) -> None:
        """Make the shard's file from its pieces and what waits, then remove the pieces."""
        shard_id = opened.shard.id
        final = resume.final_path(self._out, shard_id)
        try:
            with self._writing():
                self._check_unchanged(opened)
                is_first = self._write_final(opened, final)
                self._remove_pieces(shard_id)
        except ShardError as error:
            self.fail(opened.shard, error)
            return
        self.counters.shards += is_first
        self._close(opened)

    def _write_final(self, opened: _OpenShard, final: Path) -> bool:
        """Write and publish the whole file; False if a twin was first."""
        assert opened.num_images is not None
        folder = resume.progress_folder(self._out, opened.shard.id)
        wanted = opened.num_images * self._schema.num_captions
        for _ in range(_MAX_TRIES):
            if final.exists():
                return False
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with commit.temporary_file(folder, final.name) as temporary:
                    found = commit.write_parquet(
                        temporary,
                        self._arrow(opened.identity),
                        merge.merged(self._parts(opened)),
                        "final-half-written",
                    )
                    if found != wanted:
                        raise ShardError(
                            opened.shard.url,
                            f"its pieces hold {found} rows, wanted {wanted}; a rerun makes them",
                        )
                    reach("final-written")
                    is_first = commit.publish(temporary, final)
                reach("final-committed")
                return is_first
            except FileNotFoundError:
                continue  # as above
        raise JobError(f"{folder} vanishes whenever the shard's file is written there")

    def _parts(self, opened: _OpenShard) -> list[merge.Part]:
        """Return the pieces on disk, a twin's among them, and the rows that wait."""
        parts = []
        for path in resume.piece_paths(self._out, opened.shard.id):
            part = resume.part_of(path, opened.identity, self._record.fingerprint)
            if part is not None:
                parts.append(part)
        if opened.pending:
            table = self._schema.table([row for rows in opened.pending.values() for row in rows])
            parts.append(merge.Part(min(opened.pending), lambda: table))
        return parts

    def _check_unchanged(self, opened: _OpenShard) -> None:
        found = stamp_of(opened.shard)
        if found != (opened.identity.size, opened.identity.mtime_ns):
            raise ShardError(opened.shard.url, "changed while it was read; a rerun reads it anew")

    def _remove_pieces(self, shard_id: str) -> None:
        folder = resume.progress_folder(self._out, shard_id)
        had_failed = (folder / resume.FAILED_FILE).exists()
        commit.remove_folder(folder, after_each=lambda: reach("piece-removed"))
        if had_failed:
            list_failures(self._out)

    def _lose(self, opened: _OpenShard) -> None:
        self._lost.add(opened.shard.id)
        self._remove_pieces(opened.shard.id)
        self._close(opened)

    def _close(self, opened: _OpenShard) -> None:
        self._num_pending -= sum(len(rows) for rows in opened.pending.values())
        del self._open[opened.shard.id]

    def _arrow(self, identity: ShardIdentity) -> pa.Schema:
        return self._schema.arrow(
            {
                "captionjob": self._record.to_json(),
                resume.META_JOB.decode(): self._record.fingerprint,
                resume.META_SHARD.decode(): identity.to_json(),
            }
        )

    def _writing(self) -> _Writing:
        return _Writing(self.counters, self._out)


class _Writing:
    """Count the seconds, and explain what the disk says in one line."""

    def __init__(self, counters: StoreCounters, out: Path) -> None:
        self._counters = counters
        self._out = out
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._counters.writing_seconds += time.perf_counter() - self._began
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise JobError(f"{self._out} cannot be written: {reason}") from error
