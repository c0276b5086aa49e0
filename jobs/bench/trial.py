"""One run for a set time, on the user's shards over and over, into a folder that goes again.

A trial is the job itself: the same reader, loader threads, captioner and store. What happens
before the slots have filled for the first time is left out of its numbers. They are read just
behind a prefill, both times: captions end in bursts, and half a burst would be noise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from jobs.config import RunConfig
from jobs.doubles import Doubles
from jobs.feed import Feed, Prepared, load_ahead, weigh_result
from jobs.metering import Meter
from jobs.plan import Plan
from jobs.stopping import GraceOver, Stop
from jobs.stream import ShardStream
from pipeline.captioner import Captioner, RequestSource
from pipeline.output.store import Store
from pipeline.prefetch import Prefetcher
from pipeline.records import Request, Row, Sample
from pipeline.throughput import Snapshot

NUM_SLICES = 20_000  # of shards over and over: more than a trial comes to
WARM_SHARE = 0.3  # of a trial at most that is left out
MAX_KEPT_BYTES = 256 << 20  # of requests kept in memory


class TimeOver(BaseException):
    """A trial's time is over; raised where the network asks for requests."""


@dataclass(slots=True)
class Timed:
    """A source that ends a trial in time, and notes where its numbers begin."""

    source: RequestSource
    meter: Meter
    stop: Stop
    seconds: float
    num_warm: int  # images after which slots have filled once
    began: float = field(default_factory=time.perf_counter)
    start: Snapshot | None = None
    end: Snapshot | None = None
    num_prefills: int = 0

    def measured(self) -> Snapshot:
        """Return what was done between the first look that counts and the last."""
        if self.start is None or self.end is None:
            return self.meter.snapshot() - (self.start or Snapshot())
        return self.end - self.start

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Hand on requests, unless the time is over."""
        self._look()
        return self.source.take(max_requests, block=block)

    @property
    def is_exhausted(self) -> bool:
        """False as long as there is time, for the shards come over and over."""
        self._look()
        return self.source.is_exhausted

    def _look(self) -> None:
        passed = time.perf_counter() - self.began
        if passed >= self.seconds or self.stop.is_requested:
            raise TimeOver
        num_prefills = self.meter.engine.prefills
        if num_prefills == self.num_prefills:
            return
        self.num_prefills = num_prefills
        if self.start is not None:
            self.end = self.meter.snapshot()
        elif (
            passed >= WARM_SHARE * self.seconds or self.meter.store.counters.images >= self.num_warm
        ):
            self.start = self.meter.snapshot()


@dataclass(slots=True)
class Repeated:
    """Requests in memory, over and over under new indices."""

    requests: list[Request]
    numbers: Iterator[int] = field(default_factory=count)
    is_exhausted: bool = False

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return as many as are asked for."""
        return [self._next() for _ in range(max_requests)]

    def _next(self) -> Request:
        number = next(self.numbers)
        request = self.requests[number % len(self.requests)]
        return replace(request, ref=replace(request.ref, index=number))


@dataclass(frozen=True, slots=True)
class Alone:
    """What the loader delivers if nobody else is at work."""

    num_images: int
    seconds: float
    requests: list[Request]  # some of them, for the network alone

    @property
    def images_per_second(self) -> float:
        """Images read, opened and made ready."""
        return self.num_images / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Trials:
    """A loaded network, the user's shards, and a scratch folder."""

    plan: Plan
    captioner: Captioner
    scratch: Path
    stop: Stop
    num_made: int = 0

    def whole(self, config: RunConfig, seconds: float) -> Snapshot:
        """Run the whole job for so long; return what was done once slots had filled."""
        captioner = self.captioner.under(config.sampling, config.speed)
        plan, store = self._begin(config)
        doubles = Doubles(config.sampling.num_captions) if config.dedupe else None
        with self._loading(plan, captioner, doubles) as (stream, prefetcher):
            feed = Feed(prefetcher, stream, store, self.stop, store.add, doubles)
            meter = Meter(captioner.counters, stream, store, plan.before, feed)
            timed = Timed(feed, meter, self.stop, seconds, config.speed.slots)
            self._run(captioner, timed, feed)
            return timed.measured()

    def loader(self, config: RunConfig, seconds: float, max_kept: int) -> Alone:
        """Read, open and prepare for so long, with nobody to caption."""
        captioner = self.captioner.under(config.sampling, config.speed)
        plan, _ = self._begin(config)
        requests: list[Request] = []
        num_images, weight = 0, 0
        with self._loading(plan, captioner) as (_, prefetcher):
            began = time.perf_counter()
            while time.perf_counter() - began < seconds and not self.stop.is_requested:
                made = prefetcher.take(max_kept, block=True)
                if not made:
                    break
                num_images += len(made)
                for one in made:
                    if isinstance(one, Request) and len(requests) < max_kept:
                        weight += weigh_result(one)
                        requests += [one] if weight <= MAX_KEPT_BYTES or not requests else []
            return Alone(num_images, time.perf_counter() - began, requests)

    def network(self, config: RunConfig, requests: list[Request], seconds: float) -> Snapshot:
        """Caption requests from memory for so long."""
        captioner = self.captioner.under(config.sampling, config.speed)
        plan, store = self._begin(config)
        with self._loading(plan, captioner, slices=0) as (stream, prefetcher):
            feed = Feed(prefetcher, stream, store, self.stop, _Counted(store))
            meter = Meter(captioner.counters, stream, store, plan.before, feed)
            timed = Timed(Repeated(requests), meter, self.stop, seconds, config.speed.slots)
            self._run(captioner, timed, feed)
            return timed.measured()

    def _run(self, captioner: Captioner, timed: Timed, feed: Feed) -> None:
        try:
            for caption in self.stop.waiting_for(captioner.caption(timed)):
                feed.put(Row.from_caption(caption))
        except (TimeOver, GraceOver):
            return

    def _begin(self, config: RunConfig) -> tuple[Plan, Store]:
        self.num_made += 1
        config = replace(config, out=str(self.scratch / f"{self.num_made:03d}"))
        plan = replace(self.plan, config=config, out=config.folder())
        return plan, Store(plan.out, plan.record, config.schema, config.commit, "00000-bench")

    @contextlib.contextmanager
    def _loading(
        self,
        plan: Plan,
        captioner: Captioner,
        doubles: Doubles | None = None,
        slices: int = NUM_SLICES,
    ) -> Iterator[tuple[ShardStream, Prefetcher[Sample, Prepared]]]:
        """Start loader threads over the shards again and again, under new ids."""
        config = plan.config
        times = slices and max(1, slices // len(plan.slices))
        stream = ShardStream(
            out=plan.out,
            fingerprint=plan.record.fingerprint,
            slices=[
                replace(one, shard=replace(one.shard, id=f"{one.shard.id}-{number}"))
                for number in range(times)
                for one in plan.slices
            ],
            settings=plan.reader_settings,
            stop=self.stop,
            num_captions=config.sampling.num_captions,
        )
        with load_ahead(plan, stream, captioner, doubles) as prefetcher:
            yield stream, prefetcher


@dataclass(slots=True)
class _Counted:
    """Rows that are counted and go nowhere."""

    store: Store

    def __call__(self, row: Row) -> None:
        counters = self.store.counters
        counters.rows += 1
        counters.images += row.caption_index == 0
        counters.error_rows += row.status == "error"
