"""The one place that knows every piece: shards in, captions out, and how the run ended."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from jobs.blank import note_blank
from jobs.claiming import Claims
from jobs.config import MIN_IMAGES_FOR_RATE, RunConfig, WorkerSettings
from jobs.display import Display, Silent
from jobs.doubles import Doubles
from jobs.feed import Feed, Prepared, load_ahead
from jobs.metering import Meter, Reporter
from jobs.plan import Plan, Standby
from jobs.ranks import Place
from jobs.result import RunResult, plan_line
from jobs.stopping import GraceOver, Stop, StopClock
from jobs.stream import ShardStream
from jobs.terminal import bytes_text
from jobs.ticker import Ticker
from pipeline.captioner import Captioner, ModelSource
from pipeline.freed_memory import give_back_freed_memory
from pipeline.input.dealing import units
from pipeline.input.shards import is_table
from pipeline.output.job_record import claim_folder
from pipeline.output.leases import CLAIMS
from pipeline.output.resume import (
    tidy,
)
from pipeline.output.store import Store
from pipeline.output.waiting import Waiting
from pipeline.prefetch import Prefetcher
from pipeline.records import Row, Sample, Shard
from pipeline.remote.addresses import is_remote
from pipeline.remote.spool import Spool
from pipeline.throughput import Snapshot, ThroughputLog

TICK_SECONDS = 0.5
CLOSE_SECONDS = 1.0  # that threads stuck in a read may keep the end waiting


@dataclass(slots=True)
class Run:
    """One worker's run over its shards."""

    config: RunConfig
    stop: Stop = field(default_factory=Stop)
    display: Display = field(default_factory=Silent)
    errors: Counter[str] = field(default_factory=Counter)
    has_too_many_errors: bool = False
    standby: Standby = field(default_factory=Standby)

    def run(self) -> RunResult:
        """Caption all that is not captioned yet.

        Raises RequestError where the request is wrong, and JobError where the job cannot go on.
        """
        seconds = self.config.limits.store_seconds
        waiting = Waiting(seconds, self.stop.seconds_left, self.display.say)
        plan = Plan.make(self.config, self.standby, waiting)
        if self.config.worker.place.source != Place().source:
            self.display.say(str(self.config.worker.place))
        for line in (*plan.notes, plan_line(plan.before)):
            self.display.say(line)
        worker = worker_name(self.config.worker)
        self.display.begin(worker)
        stream = self._stream(plan, worker)
        config, claims = self.config, stream.claims
        store = Store(plan.out, plan.record, config.schema, config.commit, worker, claims)
        snapshot = Snapshot(resumed_rows=plan.before.num_rows)
        with contextlib.closing(stream):
            captioner = self._load(plan.source) if stream.slices else None
            if captioner is not None:
                self._claim(plan)
                with claims.held() if claims else contextlib.nullcontext():
                    snapshot = self._caption(captioner, plan, stream, store, worker)
                plan.out.prune(CLAIMS)
                self._note_blank(captioner, plan, snapshot)
        return RunResult(
            out=plan.out,
            before=plan.before,
            after=plan.state_now(),
            snapshot=snapshot,
            tuning=plan.tuning,
            errors=self.errors,
            failed=store.failed,
            stopped=self.stop.reason,
            limit=self.config.limits.samples if stream.is_limited else None,
            has_too_many_errors=self.has_too_many_errors,
            is_claiming=self.config.worker.is_claiming,
        )

    def _stream(self, plan: Plan, worker: str) -> ShardStream:
        limit = self.config.limits.samples
        # A limit counts the samples of finished shards too.
        is_wanted = [limit is not None or not state.is_done for state in plan.before.shards]
        slices = [one for one, wanted in zip(plan.slices, is_wanted, strict=True) if wanted]
        notes: deque[str] = deque()
        return ShardStream(
            out=plan.out,
            fingerprint=plan.record.fingerprint,
            slices=slices,
            settings=plan.reader_settings,
            stop=self.stop,
            num_captions=self.config.sampling.num_captions,
            retry=self.config.retry,
            limit=limit,
            claims=self._claims(plan, worker) if self.config.worker.is_claiming else None,
            spool=self._spool([one.shard for one in slices], notes.append),
            notes=notes,
        )

    def _claims(self, plan: Plan, worker: str) -> Claims:
        """Return this worker's claims; all workers cut the same list in the same way."""
        place = self.config.worker.place
        found = units([state.shard for state in plan.before.shards], place.world_size)
        start = place.rank * len(found) // place.world_size
        if place.world_size == 1:
            start = secrets.randbelow(len(found))
        return Claims(
            plan.out,
            found,
            worker,
            StopClock(self.stop),
            job=place.job,
            start=start,
            settings=self.config.worker.claims,
        )

    def _spool(self, shards: list[Shard], note: Callable[[str], None]) -> Spool | None:
        """Begin to fetch remote tars, while the weights load; a table is read here and there."""
        remote = [one for one in shards if is_remote(one.url) and not is_table(one)]
        if self.config.spool is None or not remote:
            return None
        self.config.spool.check()
        # Who claims shards knows which is next no sooner than it is.
        spool = Spool(self.config.spool, [] if self.config.worker.is_claiming else remote, note)
        spool.start()
        return spool

    def _load(self, source: ModelSource) -> Captioner | None:
        """Load the weights, or take those at hand; None if the run was stopped meanwhile."""
        if self.standby.captioner is not None:
            return self.standby.captioner
        self.display.say(f"loading {source.family} ({source.backend})")
        began = time.perf_counter()
        try:
            with self.stop.interruptible():
                captioner = source.load(self.config.sampling, self.config.speed)
        except GraceOver:
            return None
        memory = f", cache {bytes_text(captioner.cache_bytes)}" if captioner.cache_bytes else ""
        notices = "".join(f", {notice}" for notice in captioner.notices)
        captioner.notices.clear()
        self.display.say(f"loaded in {time.perf_counter() - began:.1f} s{memory}{notices}")
        self.standby.captioner = captioner
        return None if self.stop.is_requested else captioner

    def _claim(self, plan: Plan) -> None:
        """Take the folder, now that the request is known to be right in every part."""
        moved = claim_folder(plan.out, plan.record, overwrite=self.config.overwrite)
        if moved:
            self.display.say(f"the older output was moved to {moved}")
        tidy(plan.out, plan.stale)
        for state in plan.before.shards:
            tidy(plan.out, state.leftovers)

    def _caption(
        self, captioner: Captioner, plan: Plan, stream: ShardStream, store: Store, worker: str
    ) -> Snapshot:
        """Run the stages to their end, or to the stop, and commit what is finished."""
        give_back_freed_memory()
        config = self.config
        doubles = Doubles(config.sampling.num_captions) if config.dedupe else None
        prefetcher = load_ahead(plan, stream, captioner, doubles)
        log = ThroughputLog(plan.out, self.standby.worker or worker)
        add_row = partial(self._add, store)
        feed = Feed(prefetcher, stream, store, self.stop, add_row, doubles)
        meter = Meter(captioner.counters, stream, store, plan.before, feed, self.standby.earlier)
        self.standby.meter = meter
        reporter = Reporter(meter, log, self.display, self.stop)
        try:
            with Ticker(reporter.tick, TICK_SECONDS, self._give_up) as ticker:
                self._answer(captioner, feed, store, ticker)
                feed.settle_events()
                store.close()
                ticker.check()
            self.standby.earlier = reporter.end()
            return self.standby.earlier
        finally:
            log.close()
            _close(prefetcher)

    def _give_up(self, error: Exception) -> None:
        """End the wait for shards, or for other workers; the error is raised after it."""
        self.stop.request(str(error))

    def _answer(self, captioner: Captioner, feed: Feed, store: Store, ticker: Ticker) -> None:
        """Pull captions until there are no more, or the grace of a stop is over."""
        try:
            for caption in self.stop.waiting_for(captioner.caption(feed)):
                ticker.check()
                while captioner.notices:
                    self.display.say(captioner.notices.pop(0))
                feed.put(Row.from_caption(caption))
        except GraceOver:
            self.display.say("the grace is over: captions in flight are dropped")

    def _note_blank(self, captioner: Captioner, plan: Plan, snapshot: Snapshot) -> None:
        """Ask the network what it says of blank pictures, which an alarm has to know."""
        if not self.stop.is_requested:
            with contextlib.suppress(GraceOver), self.stop.interruptible():
                note_blank(captioner, plan.template.text, plan.out, snapshot.images)

    def _add(self, store: Store, row: Row) -> None:
        """Hand a row to the store, and stop where too many are errors."""
        store.add(row)
        if row.error:
            self.errors[row.error] += 1
            counters, limit = store.counters, self.config.limits.max_error_rate
            is_sure = counters.images >= MIN_IMAGES_FOR_RATE
            if is_sure and counters.error_rows > limit * counters.rows:
                self.has_too_many_errors = True
                self.stop.request(f"{counters.error_rows} of {counters.rows} rows are errors")


def worker_name(settings: WorkerSettings) -> str:
    """Return a name that no other process has, such as `00003-of64-Slurm-array-1129T190000-1f2e3d`.

    What stands before the first dash says whose successor a process is.
    """
    place = settings.place
    source = place.source.replace(" ", "-")
    stamp = f"{time.strftime('%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    if settings.is_claiming and place.world_size == 1:  # of unknown many: nobody's successor
        return f"{secrets.token_hex(3)}-claiming-{stamp}"
    return f"{place.rank:05d}-of{place.world_size}-{source}-{stamp}"


def _close(prefetcher: Prefetcher[Sample, Prepared]) -> None:
    """End the loader threads, without waiting for one that hangs in a dead file system."""
    closer = threading.Thread(target=prefetcher.close, daemon=True)
    closer.start()
    closer.join(CLOSE_SECONDS)
