"""`captionjob status`: how far a job is, read from its folder alone, on any machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.alarms import COLUMNS, Alarm, AlarmBell, bell_of
from jobs.results import Output, OutputReader, ShardResult
from jobs.workers import Worker, read_workers
from pipeline.errors import JobError
from pipeline.input.shards import expand_shards
from pipeline.output.failures import read_notes
from pipeline.output.folder import OutFolder, Where, open_folder
from pipeline.output.leases import CLAIMS, ClaimNames, Lease, holder_of


@dataclass(frozen=True, slots=True)
class FailedShard:
    """A shard that could not be read to its end, and why."""

    shard: str
    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease: who works on what, and how many held it before and fell silent."""

    unit: str  # a shard's id, or that of a slice
    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Status:
    """How far a job is at one moment."""

    output: Output
    num_shards: int | None  # None: the shards were not named
    num_done: int
    num_in_progress: int
    failed: tuple[FailedShard, ...]
    num_rows: int
    num_pending_rows: int  # of these, the ones in pieces
    num_total: int | None  # rows that the job will have, by the bytes of its shards
    statuses: Counter[str]
    errors: Counter[str]  # code -> rows
    workers: tuple[Worker, ...]
    claims: tuple[Claim, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @property
    def num_to_do(self) -> int | None:
        """Shards of which nothing is there."""
        if self.num_shards is None:
            return None
        return max(0, self.num_shards - self.num_done - self.num_in_progress - len(self.failed))

    @property
    def rate_now(self) -> float:
        """Images a second that all workers caption now."""
        return sum(worker.rate_now or worker.rate for worker in self.running)

    @property
    def finished_now(self) -> float:
        """Images a second that get their rows now, copies of identical ones among them."""
        return sum(
            worker.finished_now or worker.last.snapshot.finished_per_second
            for worker in self.running
        )

    @property
    def running(self) -> tuple[Worker, ...]:
        """The workers that write lines."""
        return tuple(worker for worker in self.workers if worker.state == "running")

    @property
    def stalled(self) -> tuple[Worker, ...]:
        """The workers that neither ended nor wrote a line for a while."""
        return tuple(worker for worker in self.workers if worker.state == "stalled")

    @property
    def seconds_left(self) -> float | None:
        """Time left at the rate of now."""
        if self.num_total is None or not self.finished_now:
            return None
        rows = max(0, self.num_total - self.num_rows)
        return rows / self.output.num_captions / self.finished_now

    @property
    def is_over(self) -> bool:
        """True if nobody runs, or nothing is left to do."""
        is_done = self.num_to_do == 0 and not self.num_in_progress
        return is_done or not (self.running or self.stalled)

    def to_json(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(
            {
                "out": self.output.folder.url,
                "model": self.output.model,
                "fingerprint": self.output.record.fingerprint,
                "shards": {
                    "total": self.num_shards,
                    "done": self.num_done,
                    "in_progress": self.num_in_progress,
                    "failed": [{"shard": one.shard, "error": one.reason} for one in self.failed],
                    "to_do": self.num_to_do,
                },
                "rows": {
                    "total": self.num_rows,
                    "in_pieces": self.num_pending_rows,
                    "expected": self.num_total,
                    "by_status": dict(self.statuses),
                    "by_error": dict(self.errors),
                },
                "images_per_second": round(self.rate_now, 3),
                "seconds_left": self.seconds_left,
                "workers": [_worker_json(worker) for worker in self.workers],
                "claims": [
                    {"unit": one.unit, "worker": one.worker, "generation": one.generation}
                    for one in self.claims
                ],
                "alarms": [
                    {"code": one.code, "count": one.count, "message": one.message}
                    for one in self.alarms
                ],
            },
            indent=2,
        )


@dataclass(frozen=True, slots=True)
class _Counts:
    """The rows of a shard's files by status and by error code."""

    names: tuple[str, ...]
    statuses: Counter[str]
    errors: Counter[str]


@dataclass(slots=True)
class StatusReader:
    """Reads the same folder again and again; rows of a finished shard are counted once."""

    where: Where
    patterns: Sequence[str] = ()
    folder: OutFolder = field(init=False)
    _reader: OutputReader = field(init=False)
    _counted: dict[str, _Counts] = field(default_factory=dict)
    _bell: AlarmBell | None = None
    _heard: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder = open_folder(self.where)
        self._reader = OutputReader(self.folder)

    def read(self, *, alarms: str = "none") -> Status:
        """Look at the folder now; RequestError if captionjob did not make it.

        `alarms` are of "none", of "all" rows, or of "finished" shards: then each shard is
        looked at once, however often this is called.
        """
        output = self._reader.read()
        failed = read_failed(self.folder)
        failed_ids = {one.shard for one in failed}
        pending = [shard for shard in output.shards if not shard.is_done]
        statuses, errors = Counter[str](), Counter[str]()
        for shard in output.shards:
            found = self._count(shard)
            statuses.update(found.statuses)
            errors.update(found.errors)
        shards = expand_shards(self.patterns) if self.patterns else None
        return Status(
            output=output,
            num_shards=None if shards is None else len(shards),
            num_done=len(output.done),
            num_in_progress=sum(shard.id not in failed_ids for shard in pending),
            failed=failed,
            num_rows=output.num_rows,
            num_pending_rows=sum(shard.num_rows for shard in pending),
            num_total=_expected(output, None if shards is None else [s.size or 0 for s in shards]),
            statuses=statuses,
            errors=errors,
            workers=read_workers(self.folder, time.time()),
            claims=read_claims(self.folder),
            alarms=self._alarms(output, alarms),
        )

    def _count(self, shard: ShardResult) -> _Counts:
        known = self._counted.get(shard.id)
        if known is not None and known.names == shard.names:
            return known
        try:
            table = shard.table(["status", "error"])
        except JobError:  # finished, and its pieces removed, this moment
            return _Counts((), Counter(), Counter())
        codes = [code for code in table.column("error").to_pylist() if code]
        counts = _Counts(shard.names, Counter(table.column("status").to_pylist()), Counter(codes))
        self._counted[shard.id] = counts
        return counts

    def _alarms(self, output: Output, which: str) -> tuple[Alarm, ...]:
        if which == "none":
            return ()
        bell = self._bell
        if bell is None or which == "all":
            bell = bell_of(output)
            self._heard.clear()
        self._bell = bell
        for shard in output.shards if which == "all" else output.done:
            if shard.id not in self._heard:
                try:
                    bell.look(shard.table(COLUMNS))
                except JobError:
                    continue  # as above
                self._heard.add(shard.id)
        return bell.alarms()


def read_claims(folder: OutFolder) -> tuple[Claim, ...]:
    """Return the leases that count; whether their holders live is told by time alone."""
    found = []
    for unit, generation in sorted(ClaimNames.of(folder.names(CLAIMS)).held.items()):
        with contextlib.suppress(OSError):  # given back this moment
            holder = holder_of(folder.read(Lease(unit, generation).name))
            found.append(Claim(unit, holder, generation))
    return tuple(found)


def read_failed(folder: OutFolder) -> tuple[FailedShard, ...]:
    """Return the shards that failed, from the notes beside their pieces."""
    return tuple(FailedShard(note["shard"], note["error"]) for note in read_notes(folder))


def _expected(output: Output, sizes: Sequence[int] | None) -> int | None:
    """Estimate the job's rows by the bytes of finished shards; exact once all are done."""
    num_bytes = sum(shard.identity.size for shard in output.done)
    num_rows = sum(shard.num_rows for shard in output.done)
    if sizes is None or not num_bytes:
        return None
    return max(output.num_rows, round(num_rows * sum(sizes) / num_bytes))


def _worker_json(worker: Worker) -> dict[str, object]:
    snapshot = worker.last.snapshot
    return {
        "worker": worker.name,
        "state": worker.state,
        "images": snapshot.images,
        "images_per_second_now": round(worker.rate_now, 3),
        "images_per_second": round(worker.rate, 3),
        "tokens_per_second": round(snapshot.tokens_per_second, 3),
        "slots_busy": round(snapshot.slots_busy, 4),
        "waiting": round(snapshot.share(snapshot.waiting_seconds), 4),
        "silent_seconds": round(worker.silent_seconds, 1),
    }
