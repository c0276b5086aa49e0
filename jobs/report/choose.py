"""Which rows a gallery shows: some of each kind that a person wants to see.

A row can be of several kinds and is shown once. The order of the kinds is that of their value:
where there is no room for all, the random sample shrinks first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.joining import Pair
from jobs.report.gather import Facts
from jobs.results import Output, ShardResult
from jobs.rows import rows_of
from pipeline.records import STATUSES, Row

KINDS = ("failed", "least confident", "repeated", "longest", "shortest", "random")
SHARES = {"failed": 0.16, "least confident": 0.2, "repeated": 0.12, "longest": 0.08}
SHARES["shortest"] = 0.08
MAX_REPEATED_CAPTIONS = 15
MAX_RANDOM_SHARDS = 16  # a shard is read up to its last picture: the sample must not read all

Place = tuple[int, int]  # shard's place in the output, row's place in the shard


@dataclass(frozen=True, slots=True)
class Choice:
    """A row that is shown, the kinds that it is of, and how many rows have its caption."""

    row: Row
    kinds: tuple[str, ...]
    num_same: int


def choose(
    output: Output, pairs: Sequence[Pair], facts: Facts, max_rows: int, seed: int
) -> list[Choice]:
    """Return up to `max_rows` rows of shards that are at hand, in the order of the shards."""
    at_hand = {pair.result.id for pair in pairs}
    chosen: dict[Place, list[str]] = {}
    for kind, places in _candidates(output, at_hand, facts, seed):
        num_wanted = round(SHARES.get(kind, 1.0) * max_rows)
        if kind in ("least confident", "longest", "shortest"):  # not half of a small job
            num_wanted = min(num_wanted, math.ceil(SHARES[kind] * facts.num_rows))
        for place in places:
            if num_wanted <= 0:
                break
            if place in chosen:
                chosen[place].append(kind)
            elif len(chosen) < max_rows:
                chosen[place] = [kind]
            num_wanted -= 1
    return list(_load(output.shards, chosen, facts))


def _candidates(
    output: Output, at_hand: set[str], facts: Facts, seed: int
) -> Iterator[tuple[str, Iterator[Place]]]:
    """Yield each kind with its rows, best first."""
    index = _Index(output.shards, at_hand)
    is_error = facts.status_codes == STATUSES.index("error")
    lengths = facts.num_tokens.astype(np.float64)
    logprobs = np.where(np.isnan(facts.logprobs), np.inf, facts.logprobs)
    shuffled = np.random.default_rng(seed).permutation(len(is_error))
    yield "failed", index.places(shuffled[is_error[shuffled]])
    yield "least confident", index.places(_sorted(logprobs, ~is_error))
    yield "repeated", _repeated(output.shards, at_hand, facts)
    yield "longest", index.places(_sorted(-lengths, ~is_error))
    yield "shortest", index.places(_sorted(lengths, ~is_error))
    yield "random", index.sample(seed)


def _sorted(values: npt.NDArray[np.float64], wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    order = np.argsort(values, kind="stable")
    return order[wanted[order]]


class _Index:
    """From a row's place in the job to its place in a shard."""

    def __init__(self, shards: Sequence[ShardResult], at_hand: set[str]) -> None:
        sizes = [shard.table(["index"]).num_rows for shard in shards]
        self._starts = np.cumsum([0, *sizes])
        self._at_hand = [place for place, shard in enumerate(shards) if shard.id in at_hand]

    def places(self, rows: npt.NDArray[np.intp]) -> Iterator[Place]:
        wanted = set(self._at_hand)
        for row in rows:
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            if shard in wanted:
                yield shard, int(row - self._starts[shard])

    def sample(self, seed: int) -> Iterator[Place]:
        """Yield rows at random, from a few shards at random."""
        source = random.Random(seed)
        shards = source.sample(self._at_hand, min(MAX_RANDOM_SHARDS, len(self._at_hand)))
        places = [
            (shard, row)
            for shard in shards
            for row in range(int(self._starts[shard + 1] - self._starts[shard]))
        ]
        source.shuffle(places)
        yield from places


def _repeated(shards: Sequence[ShardResult], at_hand: set[str], facts: Facts) -> Iterator[Place]:
    """Yield rows of the most repeated captions, first one of each, then a second, and so on."""
    texts = [one.text for one in facts.repeated[:MAX_REPEATED_CAPTIONS]]
    found: dict[str, list[Place]] = {text: [] for text in texts}
    for place, shard in enumerate(shards if texts else ()):
        if shard.id in at_hand:
            captions = shard.table(["caption"]).column("caption")
            is_one = pc.is_in(captions, pa.array(texts, pa.string())).to_numpy()
            for row in np.flatnonzero(is_one):
                found[captions[int(row)].as_py()].append((place, int(row)))
    longest = max((len(places) for places in found.values()), default=0)
    for turn in range(longest):
        for text in texts:
            if turn < len(found[text]):
                yield found[text][turn]


def _load(
    shards: Sequence[ShardResult], chosen: dict[Place, list[str]], facts: Facts
) -> Iterator[Choice]:
    by_shard: dict[int, list[int]] = {}
    for shard, row in sorted(chosen):
        by_shard.setdefault(shard, []).append(row)
    for shard, rows in by_shard.items():
        table = shards[shard].table().take(pa.array(rows))
        for place, one in zip(rows, rows_of(table), strict=True):
            num_same = 0 if one.caption is None else facts.captions[one.caption]
            yield Choice(one, tuple(chosen[shard, place]), num_same)
