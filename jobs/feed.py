"""One unbroken stream of requests over all shards, so that slots stay full across borders.

loader threads                                    the captioner's thread
ShardStream ──► Sample ──► Preparer ──► Request ──► Feed.take ──► captioner ──► Feed.put ─┐
     │                        └───────► error Rows, Doubles ────────────────────────────► store
     └── shard begun, ended or failed ────────────────────────────────────────────────► store
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.doubles import Double, Doubles, content_of
from jobs.stopping import Stop
from jobs.stream import ShardBegan, ShardEnded, ShardStream
from pipeline.captioner import Captioner
from pipeline.errors import SampleError
from pipeline.images.opening import ImageSettings, facts_of, open_sample
from pipeline.images.pixel_room import PixelRoom
from pipeline.output.store import Store
from pipeline.prefetch import Prefetcher, PrefetchLimits
from pipeline.prompts import PromptTemplate, kept_fields
from pipeline.records import Request, Row, Sample

if TYPE_CHECKING:
    from jobs.plan import Plan

Prepared = Request | list[Row] | Double  # what a loader thread makes of a sample


@dataclass(frozen=True, slots=True)
class Preparer:
    """Makes a request of a sample, or the error rows that stand in its place."""

    captioner: Captioner
    template: PromptTemplate
    images: ImageSettings
    keep: tuple[str, ...]
    num_captions: int
    room: PixelRoom = field(default_factory=PixelRoom)
    doubles: Doubles | None = None  # to look for, with --dedupe

    def __call__(self, sample: Sample) -> Prepared:
        """Open the picture and render the prompt; safe on any thread."""
        double = None if self.doubles is None else self._double(sample)
        if double is not None and self.doubles is not None and not self.doubles.is_first(double):
            return double
        ref = sample.ref if double is None else double.known_as
        try:
            with self.room.visit() as claim:
                image, facts = open_sample(sample, self.images, claim)
                prompt = self.template.render(sample)
                kept = kept_fields(sample, self.keep)
                return self.captioner.prepare(ref, facts, image, prompt, kept)
        except SampleError as error:
            return self._error_rows(sample, error)
        except Exception as error:  # a foreign processor can raise anything; it costs this row
            detail = f"{type(error).__name__}: {error}"
            return self._error_rows(sample, SampleError("internal", detail[:200]))

    def _double(self, sample: Sample) -> Double | None:
        """Return what others may share with a sample; None for one that cannot be captioned."""
        if sample.fault is not None or not sample.data:
            return None
        try:
            prompt = self.template.render(sample)
        except Exception:  # whatever it is, it is told where the sample's turn comes
            return None
        return Double(sample.ref, kept_fields(sample, self.keep), content_of(sample, prompt))

    def _error_rows(self, sample: Sample, error: SampleError) -> list[Row]:
        facts = facts_of(sample.data)
        kept = kept_fields(sample, self.keep)
        return [
            Row(
                ref=sample.ref,
                facts=facts,
                status="error",
                caption_index=caption_index,
                error=error.code,
                error_detail=error.detail,
                kept=kept,
            )
            for caption_index in range(self.num_captions)
        ]


def load_ahead(
    plan: Plan, stream: ShardStream, captioner: Captioner, doubles: Doubles | None
) -> Prefetcher[Sample, Prepared]:
    """Begin to make requests of a stream's samples, on loader threads, a bounded number ahead."""
    config = plan.config
    preparer = Preparer(
        captioner,
        plan.template,
        config.images,
        config.keep,
        config.sampling.num_captions,
        doubles=doubles,
    )
    limits = PrefetchLimits(
        threads=config.worker.loader_workers,
        max_items=2 * config.speed.prefill_batch + config.worker.loader_workers,
    )
    return Prefetcher(stream, preparer, limits, weigh_item=weigh_sample, weigh_result=weigh_result)


SETTLE_SECONDS = 0.2  # between looks at what else is to be done, while the network waits


class Feed:
    """The captioner's source of requests; error rows and news of shards go to the store."""

    def __init__(
        self,
        prefetcher: Prefetcher[Sample, Prepared],
        stream: ShardStream,
        store: Store,
        stop: Stop,
        add_row: Callable[[Row], None],
        doubles: Doubles | None = None,
    ) -> None:
        """Take from `prefetcher`; `add_row` gets each row, of answers and of errors."""
        self._prefetcher = prefetcher
        self._stream = stream
        self._store = store
        self._stop = stop
        self._add_row = add_row
        self._num_out = 0  # rows that are still to come of requests that were handed out
        self._doubles = doubles
        self._starved_since: float | None = None
        self._starved_seconds = 0.0

    @property
    def starved_seconds(self) -> float:
        """Seconds in which the network wanted more requests than were ready."""
        since = self._starved_since
        return self._starved_seconds + (0.0 if since is None else time.perf_counter() - since)

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return up to `max_requests` that are ready; with `block`, wait for at least one."""
        requests = self._take(max_requests, block=block)
        now = time.perf_counter()
        if self._starved_since is not None:
            self._starved_seconds += now - self._starved_since
        is_short = len(requests) < max_requests and not self.is_exhausted
        self._starved_since = now if is_short else None
        return requests

    def _take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Take what is ready, or wait.

        Where shards are taken by lease the loader may itself be waiting, for the end of another
        worker's shard, and that worker for ours. So while this waits it tells the store of ends,
        and gives up on a fuller batch: what was handed out is to be answered first.
        """
        while not self._stop.is_requested:
            results = self._prefetcher.take(max_requests, block=block, seconds=SETTLE_SECONDS)
            with self._stop.protected():
                self.settle_events()
                for result in results:
                    self._receive(result)
            requests = [result for result in results if isinstance(result, Request)]
            if requests or not block or (not results and self._is_to_go_on):
                self._num_out += len(requests) * self._stream.num_captions
                return requests
        return []

    @property
    def _is_to_go_on(self) -> bool:
        """Whether waiting for a further request is of no use now."""
        claims = self._stream.claims
        is_waiting = claims is not None and claims.is_waiting and self._num_out > 0
        return is_waiting or self._prefetcher.is_exhausted

    def put(self, row: Row) -> None:
        """Hand on the row of an answer, and of the doubles that waited for it."""
        self._num_out -= 1
        self._hand_on(row)

    def _hand_on(self, row: Row) -> None:
        for one in [row] if self._doubles is None else self._doubles.settle(row):
            self._add_row(one)

    def _receive(self, result: Prepared) -> None:
        """Take what needs no network: error rows, and doubles of a sample that came before."""
        if self._doubles is not None:
            self._doubles.enter(_shard_of(result))
        if isinstance(result, list):
            for row in result:
                self._hand_on(row)
        elif isinstance(result, Double):
            assert self._doubles is not None, "only they make one"
            for row in self._doubles.join(result):
                self._add_row(row)

    @property
    def is_exhausted(self) -> bool:
        """True once no further request will ever come."""
        return self._stop.is_requested or self._prefetcher.is_exhausted

    def settle_events(self) -> None:
        """Tell the store which shards began, ended or failed; before any row that comes after."""
        events = self._stream.events
        while events:
            event = events.popleft()
            if isinstance(event, ShardBegan):
                self._store.begin(event.state, event.identity, event.mine)
            elif isinstance(event, ShardEnded):
                self._store.end(event.mine.id, event.num_images)
            else:
                self._store.fail(event.mine.shard, event.error, event.mine)


def weigh_sample(sample: Sample) -> int:
    """Return the bytes that a sample holds."""
    return len(sample.data) + sum(len(data) for data in sample.fields.values())


def weigh_result(result: Prepared) -> int:
    """Return the bytes that a request's pixels hold."""
    if not isinstance(result, Request) or result.images is None:
        return 0
    pixels = result.images.pixels
    return pixels.numel() * pixels.element_size()


def _shard_of(result: Prepared) -> str:
    return result[0].ref.shard if isinstance(result, list) else result.ref.shard
