"""Samples of all shards of a worker, one after another, and news of each shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

from jobs.claiming import Claims
from jobs.stopping import Stop
from pipeline.errors import ShardError
from pipeline.input.dealing import Slice
from pipeline.input.identity import ShardIdentity, identify
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.input.shards import open_shard
from pipeline.output.folder import OutFolder
from pipeline.output.resume import ShardState, tidy
from pipeline.output.retry import retry_state
from pipeline.records import Sample, Shard
from pipeline.remote.addresses import is_remote
from pipeline.remote.spool import Spool


@dataclass(frozen=True, slots=True)
class ShardBegan:
    """A shard, or a slice of one, is about to be read."""

    mine: Slice
    state: ShardState
    identity: ShardIdentity


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """A shard was read to its end, which came whole."""

    mine: Slice
    num_images: int


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """A shard is damaged or unreachable; what was read of it stands."""

    mine: Slice
    error: ShardError


ShardEvent = ShardBegan | ShardEnded | ShardFailed


@dataclass(slots=True)
class ShardStream:
    """Reads shard after shard, on one loader thread at a time."""

    out: OutFolder
    fingerprint: str
    slices: list[Slice]
    settings: ReaderSettings
    stop: Stop
    num_captions: int = 1
    retry: frozenset[str] = frozenset()  # statuses of rows to make again
    limit: int | None = None  # samples of the job, counted from its first
    events: deque[ShardEvent] = field(default_factory=deque)
    all_stats: list[ShardStats] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of each of these, this worker's part
    claims: Claims | None = None  # where slices are taken one by one
    is_limited: bool = False  # the limit was reached before the end of a shard
    num_counted: int = 0  # images of shards that turned out to be done already
    spool: Spool | None = None  # of remote shards
    notes: deque[str] = field(default_factory=deque)  # of connections that are made anew
    num_elsewhere: int = 0  # images that the reader passed and that other workers caption

    @property
    def bytes_read(self) -> int:
        """Bytes read from shards in this run."""
        return sum(stats.bytes_read for stats in self.all_stats)

    @property
    def bytes_passed(self) -> int:
        """How far the reader is, what it sought past included."""
        return sum(stats.bytes_passed for stats in self.all_stats)

    @property
    def bytes_seen(self) -> float:
        """The same, of a slice its part alone."""
        pairs = zip(tuple(self.all_stats), self.shares, strict=False)
        return sum(stats.bytes_passed * share for stats, share in pairs)

    @property
    def num_bytes(self) -> int:
        """What there is to pass in all; 0 where nobody knows beforehand."""
        if self.claims is not None:
            return 0
        return sum(one.shard.size or 0 for one in self.slices)

    @property
    def num_images_seen(self) -> int:
        """This worker's images that the reader has passed, those committed before among them."""
        passed = sum(stats.num_images for stats in self.all_stats)
        return self.num_counted + passed - self.num_elsewhere

    @property
    def num_skipped(self) -> int:
        """Of these, the ones that were committed before."""
        skipped = sum(stats.num_skipped for stats in self.all_stats)
        return self.num_counted + max(0, skipped - self.num_elsewhere)

    def close(self) -> None:
        """Forget what was fetched ahead."""
        if self.spool is not None:
            self.spool.close()

    def __iter__(self) -> Iterator[Sample]:
        num_left = self.limit
        for mine in self.claims or self.slices:
            if self.stop.is_requested:
                return
            if num_left is not None and num_left <= 0:
                self.is_limited = True
                return
            num_images = yield from self._read(mine, num_left)
            if num_left is not None:
                num_left -= num_images

    def _read(self, mine: Slice, max_images: int | None) -> Generator[Sample, None, int]:
        """Yield what is not yet committed of a slice; return how many images its shard has."""
        state = retry_state(self.out, mine.shard, self.fingerprint, self.retry)
        tidy(self.out, state.leftovers)
        if state.is_done:
            if self.spool is not None:
                self.spool.skip(mine.shard)
            num_images = state.num_rows // self.num_captions
            self.num_counted += round(num_images * mine.share)
            if self.claims is not None:
                self.claims.finish(mine)  # another worker was quicker
            return num_images
        stats = ShardStats()
        self.shares.append(mine.share)
        self.all_stats.append(stats)
        skip = _Skip(self, mine, state.committed)
        try:
            identity = identify(mine.shard, self.notes.append)
            self.events.append(ShardBegan(mine, state, identity))
            open_tar = partial(self._open, identity)
            for sample in read_shard(
                mine.shard, self.settings, skip=skip, stats=stats, open_tar=open_tar
            ):
                if max_images is not None and sample.ref.index >= max_images:
                    self.is_limited = True
                    return max_images
                if self.stop.is_requested:
                    return stats.num_images
                yield sample
            self.events.append(ShardEnded(mine, stats.num_images))
        except ShardError as error:
            self.events.append(ShardFailed(mine, error))
        return stats.num_images

    def _open(self, identity: ShardIdentity, shard: Shard) -> BinaryIO:
        """Open what was identified: from the spool, if it is in there."""
        stamp = (identity.size, identity.mtime_ns)
        spooled = None
        if self.spool is not None and is_remote(shard.url):
            spooled = self.spool.open(shard, stamp)
        return spooled or open_shard(shard, stamp=stamp, note=self.notes.append)


@dataclass(frozen=True, slots=True)
class _Skip:
    """The images that this worker leaves alone; the reader asks once for each."""

    stream: ShardStream
    mine: Slice
    committed: frozenset[int]

    def __contains__(self, index: object) -> bool:
        if index in self.mine:
            return index in self.committed
        self.stream.num_elsewhere += 1
        return True
