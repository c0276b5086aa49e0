"""Which worker reads what: whole shards where that balances, slices of shards where it doesn't.

A slice is an arc of a circle on which the images of a shard are laid out:

    image i stands at  i * step  (mod one turn)        0         slice of worker 1
    step / turn an irrational such as the golden     7 /──┬──\\ 3
    section, so that any run of images is spread      |   │   |   slices are disjoint, and
    evenly over any arc, to within an image or two    2 \\──┴──/ 4  together they are the circle

So a shard can be cut without knowing how many images it has, in any proportions, and a worker
knows from an index alone whether an image is its own. What it costs is that each worker of a
shard walks all of its headers; data of others is sought past. Byte ranges would not do: an
image's index is known only to who has walked the tar from its start.

Each world size has a step of its own, out of a few: what a slice of an unfinished job has left
is spread over all slices of the next one, not given to a single worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import RequestError
from pipeline.records import Shard

TURN = 1 << 64
UNEVEN = 1.1  # a worker may have so many times its fair share before shards are cut
UNITS_A_WORKER = 4  # to take, at least: the last ones then end at about the same time
# Fractions of square roots: their multiples are evenly spread, and no two of them go together.
STEPS = tuple(
    (math.isqrt(number << 128) - (math.isqrt(number) << 64)) | 1 for number in (5, 2, 3, 7, 11, 13)
)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some images of a shard: those from `begin` up to `end` of a turn, or all."""

    shard: Shard
    begin: int = 0
    end: int = TURN
    step: int = STEPS[0]

    @property
    def is_whole(self) -> bool:
        """True for a slice that is the shard."""
        return (self.begin, self.end) == (0, TURN)

    @property
    def share(self) -> float:
        """The share of the shard's images, about."""
        return (self.end - self.begin) / TURN

    @property
    def id(self) -> str:
        """A name that is safe in a file system; of a whole shard, the shard's."""
        if self.is_whole:
            return self.shard.id
        return f"{self.shard.id}+{self.begin >> 44:05x}-{self.end >> 44:05x}"

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.begin <= index * self.step % TURN < self.end


def deal(shards: Sequence[Shard], rank: int, world_size: int) -> list[Slice]:
    """Return what worker `rank` reads: each image has exactly one of `world_size` workers.

    Every worker works out the same plan from the same list; one's own shards keep their order.
    The largest shard goes to the worker with the fewest bytes so far, and so on down. Where
    that leaves somebody with more than a tenth above the fair share, shards that do not fit
    into it are cut instead. A shard of unknown size counts as one of middling size.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise RequestError(
            f"worker {rank} of {world_size}: wanted a rank from 0 to the world size less 1"
        )
    weights = _weights(shards)
    order = sorted(range(len(shards)), key=lambda place: (-weights[place], place))
    loads = [(0, 0, worker) for worker in range(world_size)]  # bytes, shards, rank
    mine: list[int] = []
    for place in order:
        load, count, worker = heapq.heappop(loads)
        heapq.heappush(loads, (load + weights[place], count + 1, worker))
        if worker == rank:
            mine.append(place)
    if max(loads)[0] * world_size <= UNEVEN * sum(weights):
        return [Slice(shards[place]) for place in sorted(mine)]
    return _deal_cut(shards, weights, order, rank, world_size)


def units(shards: Sequence[Shard], num_workers: int) -> list[Slice]:
    """Return what workers take one at a time: shards, cut where there are few for so many."""
    weights = _weights(shards)
    wanted = UNITS_A_WORKER * num_workers
    if num_workers == 1 or len(shards) >= wanted:
        return [Slice(shard) for shard in shards]
    total = sum(weights)
    return [
        one
        for shard, weight in zip(shards, weights, strict=True)
        for one in cut(shard, max(1, -(-wanted * weight // total)))
    ]


def cut(shard: Shard, num_slices: int) -> list[Slice]:
    """Return a shard in equal slices."""
    ends = [TURN * number // num_slices for number in range(num_slices + 1)]
    step = STEPS[num_slices % len(STEPS)]
    return [Slice(shard, ends[i], ends[i + 1], step) for i in range(num_slices)]


def _deal_cut(
    shards: Sequence[Shard], weights: Sequence[int], order: Sequence[int], rank: int, size: int
) -> list[Slice]:
    """Give whole shards as long as they fit, and the rest as a tape cut to what room is left.

    Weights count `size` fold here, so that the fair share is the sum of them: all is exact.
    """
    rooms = [(-sum(weights), worker) for worker in range(size)]  # the widest comes first
    mine: list[tuple[int, Slice]] = []
    tape: list[int] = []
    for place in order:
        room, worker = rooms[0]
        if weights[place] * size > -room:
            tape.append(place)
            continue
        heapq.heapreplace(rooms, (room + weights[place] * size, worker))
        if worker == rank:
            mine.append((place, Slice(shards[place])))
    start = 0  # of a worker on the tape
    for room, worker in sorted(rooms):
        if worker == rank:
            mine += _stretch(shards, weights, tape, size, start, start - room)
        start -= room
    return [one for _, one in sorted(mine, key=lambda pair: pair[0])]


def _stretch(
    shards: Sequence[Shard],
    weights: Sequence[int],
    tape: Sequence[int],
    size: int,
    start: int,
    end: int,
) -> list[tuple[int, Slice]]:
    """Return the slices that lie between two points of the tape."""
    found = []
    at = 0
    for place in tape:
        length = weights[place] * size
        begin = TURN * min(max(start - at, 0), length) // length
        stop = TURN * min(max(end - at, 0), length) // length
        if begin < stop:
            found.append((place, Slice(shards[place], begin, stop, STEPS[size % len(STEPS)])))
        at += length
    return found


def _weights(shards: Sequence[Shard]) -> list[int]:
    known = [shard.size for shard in shards if shard.size]
    middling = sum(known) // len(known) if known else 1
    return [max(1, middling if shard.size is None else shard.size) for shard in shards]
