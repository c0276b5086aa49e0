"""How far a run is and how fast, read from every stage at once, from any thread."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields

from jobs.display import Display, Standing
from jobs.feed import Feed
from jobs.stopping import Stop
from jobs.stream import ShardStream
from pipeline.output.resume import FolderState
from pipeline.output.store import Store
from pipeline.records import EngineCounters
from pipeline.throughput import Snapshot, ThroughputLog

LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads all counters of a run."""

    engine: EngineCounters
    stream: ShardStream
    store: Store
    before: FolderState
    feed: Feed
    earlier: Snapshot = field(default_factory=Snapshot)  # runs of this process before this one
    began: float = field(default_factory=time.perf_counter)
    cpu_began: float = field(default_factory=time.process_time)
    engine_began: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_began", asdict(self.engine))

    def snapshot(self) -> Snapshot:
        """Return what this process has done since it began to caption."""
        names = {one.name for one in fields(Snapshot)}
        engine = {
            name: value - self.engine_began[name]
            for name, value in asdict(self.engine).items()
            if name in names
        }
        counters = self.store.counters
        return self.earlier + Snapshot(
            seconds=time.perf_counter() - self.began,
            images=counters.images,
            copied_images=counters.copied_images,
            rows=counters.rows,
            error_rows=counters.error_rows,
            resumed_rows=self.before.num_rows,
            bytes_read=self.stream.bytes_read,
            writing_seconds=counters.writing_seconds,
            starved_seconds=self.feed.starved_seconds,
            cpu_seconds=time.process_time() - self.cpu_began,
            **engine,
        )

    def standing(self) -> Standing:
        """Return how far the run is; the total is what the bytes read so far let expect."""
        snapshot = self.snapshot()
        stream = self.stream
        num_done = stream.num_skipped + self.store.counters.images
        num_total = None
        if stream.bytes_passed and stream.num_bytes:
            share = min(1.0, stream.bytes_passed / stream.num_bytes)
            num_total = max(num_done, round(stream.num_images_seen / share))
        if stream.limit is not None:
            num_total = min(stream.limit, num_total or stream.limit)
        return Standing(num_done, num_total, snapshot, stream.num_images_seen, stream.bytes_seen)


@dataclass(slots=True)
class Reporter:
    """Shows, logs and commits at set times; called by the ticker's thread."""

    meter: Meter
    log: ThroughputLog
    display: Display
    stop: Stop
    next_log: float = 0.0
    has_said_stop: bool = False

    def tick(self) -> None:
        """Do what is due."""
        standing = self.meter.standing()
        while self.meter.stream.notes:
            self.display.say(f"again: {self.meter.stream.notes.popleft()}")
        self.display.show(standing)
        if self.stop.is_requested and not self.has_said_stop:
            self.has_said_stop = True
            self.display.say(f"stopping ({self.stop.reason}): committing what is finished")
        self.meter.store.commit_if_due()
        if time.monotonic() >= self.next_log:
            self.next_log = time.monotonic() + LOG_SECONDS
            self.log.write(standing.snapshot, "interval", time.time())

    def end(self) -> Snapshot:
        """Show and log the last numbers."""
        standing = self.meter.standing()
        self.display.show(standing)
        self.log.write(standing.snapshot, "end", time.time())
        return standing.snapshot
