"""One shard in work: its finished samples to pieces, and its pieces to one file.

Every method may meet a twin, another worker on the same shard: then the first to finish wins.
Where a shard is cut into slices, each worker commits its own as pieces and then looks whether
all are there; so the last one to commit always finds them, and makes the file.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.errors import JobError, ShardError
from pipeline.fault_points import reach
from pipeline.input.dealing import Slice
from pipeline.input.identity import ShardIdentity, stamp_of
from pipeline.output import commit, footer, merge, resume
from pipeline.output.failures import list_failures
from pipeline.output.folder import Draft, OutFolder
from pipeline.output.job_record import JobRecord
from pipeline.output.retry import base_parts
from pipeline.output.schema import RowSchema
from pipeline.records import Row, Shard

_MAX_TRIES = 20


@dataclass(slots=True)
class OpenShard:
    """What is committed of a shard, and what waits for the next piece."""

    shard: Shard
    identity: ShardIdentity
    out: OutFolder
    record: JobRecord
    schema: RowSchema
    committed: set[int]  # indices
    mine: Slice  # of the shard's images, those that this worker captions
    base: resume.Base | None = None  # a finished file of which samples are made again
    pending: dict[int, list[Row]] = field(default_factory=dict)  # whole samples, by index
    begun: dict[int, list[Row]] = field(default_factory=dict)  # samples that lack captions
    num_images: int | None = None  # of the shard, once the reader came to the end
    missing: set[int] = field(default_factory=set)  # from then on: mine, neither here nor committed

    def end(self, num_images: int) -> None:
        """Note how many images the shard has."""
        self.num_images = num_images
        mine = (index for index in range(num_images) if index in self.mine)
        self.missing = set(mine) - self.committed - self.pending.keys()

    def add(self, rows: list[Row]) -> None:
        """Take all rows of one sample."""
        self.pending[rows[0].ref.index] = rows
        self.missing.discard(rows[0].ref.index)

    @property
    def is_complete(self) -> bool:
        """True once each image that is this worker's is committed or waits."""
        return self.num_images is not None and not self.missing

    def has_all(self) -> bool:
        """Look whether the pieces on disk, those of other workers too, hold the whole shard."""
        found = set(self.committed)
        for name in resume.pieces_in(self.out, self.folder):
            if self._part(name) is not None:
                with contextlib.suppress(FileNotFoundError):  # another worker finishes the shard
                    rows = resume.read_rows(self.out, name, ["index"])
                    found.update(rows.column("index").to_pylist())
        return len(found) == self.num_images

    @property
    def num_pending_rows(self) -> int:
        """Rows of whole samples that wait."""
        return sum(len(rows) for rows in self.pending.values())

    @property
    def fingerprint(self) -> str:
        """The job's."""
        return self.record.fingerprint

    @property
    def final(self) -> str:
        """The shard's file."""
        return resume.final_name(self.shard.id)

    @property
    def folder(self) -> str:
        """Where the pieces lie."""
        return self.base.folder if self.base else resume.progress_folder(self.shard.id)

    @property
    def version(self) -> str:
        """Of the finished file that a retry is about, else ``""``."""
        return self.base.version if self.base else ""

    def is_over(self) -> bool:
        """Look whether a twin has made, or replaced, the shard's file."""
        found = self.out.stat(self.final)
        if self.base is not None:
            return found is None or found.version != self.base.version
        return found is not None

    def write_piece(self, name: str) -> bool:
        """Commit what waits as a piece; False if a twin has finished the shard."""
        whole = f"{self.folder}/{name}"
        schema = self._arrow(self.version)
        table = self._pending_table()
        for _ in range(_MAX_TRIES):
            if self.is_over():
                return False
            try:
                with self.out.draft(whole) as draft:
                    commit.write_parquet(draft, schema, [table], "piece-half-written")
                    reach("piece-written")
                    self.out.put_over(draft, whole)  # the name is this run's alone
            except FileNotFoundError:
                continue  # the folder went: a twin finishes this very moment
            reach("piece-committed")
            if not self.is_over():
                self.committed.update(self.pending)
                self.pending.clear()
                return True
            self.out.remove(whole)
        raise JobError(f"{self.out.place(self.folder)} vanishes whenever a piece is written there")

    def write_final(self) -> bool:
        """Make the shard's file from its pieces and what waits; False if a twin was first.

        Raises ShardError where the shard has changed, rows are missing, or the file that has
        the name is no twin's.
        """
        assert self.num_images is not None
        found = stamp_of(self.shard)
        if found != (self.identity.size, self.identity.mtime_ns):
            raise ShardError(self.shard.url, "changed while it was read; a rerun reads it anew")
        folder = self.folder
        for _ in range(_MAX_TRIES):
            if self.is_over():
                self._check_twin()
                return False
            try:
                # Beside the pieces, where a draft that a crash leaves is looked for.
                with self.out.draft(f"{folder}/{self.final}") as draft:
                    self._write_whole(draft, self.num_images * self.schema.num_captions)
                    reach("final-written")
                    is_first = self._publish(draft)
                reach("final-committed")
                if not is_first:
                    self._check_twin()
                return is_first
            except FileNotFoundError:
                continue  # as above
        place = self.out.place(folder)
        raise JobError(f"{place} vanishes whenever the shard's file is written there")

    def remove_pieces(self) -> None:
        """Remove the pieces, and the note of an earlier failure, of a shard that is done."""
        progress = resume.progress_folder(self.shard.id)
        had_failed = self.out.stat(f"{progress}/{resume.FAILED_FILE}") is not None
        for folder in {self.folder, progress}:
            self.out.clear(folder, after_each=lambda: reach("piece-removed"))
        if had_failed:
            list_failures(self.out)

    def _write_whole(self, draft: Draft, num_rows: int) -> None:
        rows = merge.merged(self._parts())
        found = commit.write_parquet(draft, self._arrow(), rows, "final-half-written")
        if found != num_rows:
            raise ShardError(
                self.shard.url,
                f"its pieces hold {found} rows, wanted {num_rows}; a rerun makes them",
            )

    def _publish(self, draft: Draft) -> bool:
        if self.base is None:
            return self.out.put_new(draft, self.final)
        return self.out.put_over(draft, self.final, self.base.version)

    def _check_twin(self) -> None:
        found = footer.read_footer(self.out, self.final, self.fingerprint)
        if isinstance(found, str):
            place = self.out.place(self.final)
            raise ShardError(self.shard.url, f"{place} is in its way: {found}")

    def _parts(self) -> list[merge.Part]:
        """Return the pieces on disk, a twin's among them, the rows that wait, and those kept."""
        parts = []
        for name in resume.pieces_in(self.out, self.folder):
            part = self._part(name)
            if part is not None:
                parts.append(part)
        if self.pending:
            parts.append(merge.Part(min(self.pending), self._pending_table))
        if self.base is not None:
            parts += base_parts(self.out, self.base)
        return parts

    def _part(self, name: str) -> merge.Part | None:
        return resume.part_of(self.out, name, self.identity, self.fingerprint, self.version)

    def _pending_table(self) -> pa.Table:
        return self.schema.table([row for rows in self.pending.values() for row in rows])

    def _arrow(self, version: str = "") -> pa.Schema:
        metadata = {
            "captionjob": self.record.to_json(),
            footer.META_JOB.decode(): self.record.fingerprint,
            footer.META_SHARD.decode(): self.identity.to_json(),
        }
        if version:
            metadata[footer.META_VERSION.decode()] = version
        return self.schema.arrow(metadata)
