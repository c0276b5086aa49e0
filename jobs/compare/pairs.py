"""Rows of two outputs that are of the same image, and what they agree on."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jobs.corrections import key_of
from jobs.results import Output, ShardResult
from jobs.scores import tokenise
from pipeline.errors import RequestError
from pipeline.records import Row

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RowPair:
    """One image's captions in A and in B."""

    a: Row
    b: Row
    overlap: float  # F1 of the words of the two captions, 0 to 1

    @property
    def is_same(self) -> bool:
        """True if both have the same caption, or the same error."""
        return (self.a.caption, self.a.error) == (self.b.caption, self.b.error)

    @property
    def has_error(self) -> bool:
        """True if either has no caption."""
        return self.a.caption is None or self.b.caption is None


@dataclass(slots=True)
class Side:
    """What one output has of the common images, in sums."""

    num_rows: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_words: int = 0
    sum_logprob: float = 0.0
    num_logprobs: int = 0
    captions: set[int] = field(default_factory=set)  # hashes of the different captions

    def add(self, row: Row) -> None:
        """Count one row."""
        self.num_rows += 1
        if row.caption is None:
            self.num_errors += 1
            return
        self.num_tokens += row.num_caption_tokens
        self.num_words += len(row.caption.split())
        self.captions.add(hash(row.caption))
        if row.mean_logprob is not None:
            self.sum_logprob += row.mean_logprob
            self.num_logprobs += 1

    @property
    def num_captions(self) -> int:
        """Rows with a caption."""
        return self.num_rows - self.num_errors


@dataclass(slots=True)
class Reservoir(Generic[Item]):
    """Keeps a fair random sample of all that is offered."""

    size: int
    source: random.Random
    kept: list[Item] = field(default_factory=list)
    num_offered: int = 0

    def offer(self, item: Item) -> None:
        """Keep the item with the chance that is its due."""
        self.num_offered += 1
        if len(self.kept) < self.size:
            self.kept.append(item)
        elif (place := self.source.randrange(self.num_offered)) < self.size:
            self.kept[place] = item


class Comparison:
    """All pairs seen once: sums for the table, and some pairs of each kind for the page."""

    def __init__(self, max_pictures: int, seed: int) -> None:
        """Keep up to `max_pictures` pairs."""
        source = random.Random(seed)
        self.a, self.b = Side(), Side()
        self.num_same = 0
        self.sum_overlap = 0.0
        self.num_overlaps = 0
        self.only_a = self.only_b = 0
        self._num_different = round(0.4 * max_pictures)
        self._different: list[tuple[float, float, int, RowPair]] = []
        self._same: Reservoir[RowPair] = Reservoir(round(0.15 * max_pictures), source)
        self._failed: Reservoir[RowPair] = Reservoir(round(0.15 * max_pictures), source)
        rest = max_pictures - self._num_different - self._same.size - self._failed.size
        self._random: Reservoir[RowPair] = Reservoir(rest, source)
        self._source = source

    def add(self, pair: RowPair) -> None:
        """Count one pair, and keep it if it is worth showing."""
        self.a.add(pair.a)
        self.b.add(pair.b)
        self.num_same += pair.is_same
        self._random.offer(pair)
        if pair.has_error:
            self._failed.offer(pair)
            return
        self.sum_overlap += pair.overlap
        self.num_overlaps += 1
        if pair.is_same:
            self._same.offer(pair)
            return
        entry = (-pair.overlap, self._source.random(), self.num_overlaps, pair)
        if len(self._different) < self._num_different:
            heapq.heappush(self._different, entry)
        elif self._different:
            heapq.heappushpop(self._different, entry)

    @property
    def num_pairs(self) -> int:
        """Rows that both have."""
        return self.a.num_rows

    @property
    def mean_overlap(self) -> float:
        """Mean F1 of the words where both have a caption."""
        return self.sum_overlap / self.num_overlaps if self.num_overlaps else 0.0

    def shown(self) -> list[tuple[RowPair, tuple[str, ...]]]:
        """Return the kept pairs with their kinds, most different first."""
        kinds: dict[tuple[str, int, int], list[str]] = {}
        pairs: dict[tuple[str, int, int], RowPair] = {}
        by_kind = (
            ("most different", [entry[3] for entry in sorted(self._different, reverse=True)]),
            ("failed", self._failed.kept),
            ("same", self._same.kept),
            ("random", self._random.kept),
        )
        for kind, found in by_kind:
            for pair in found:
                pairs[key_of(pair.a)] = pair
                kinds.setdefault(key_of(pair.a), []).append(kind)
        return [(pair, tuple(kinds[key])) for key, pair in pairs.items()]


def row_pairs(a: Output, b: Output, comparison: Comparison) -> Iterator[tuple[str, list[RowPair]]]:
    """Yield, for each shard that both have, its id in A and its pairs; count what has none.

    Raises RequestError where the two have no image in common.
    """
    by_id = {shard.id: shard for shard in b.shards}
    by_bytes = {(one.identity.size, one.identity.sha256): one for one in b.shards}
    num_pairs = 0
    for shard in a.shards:
        other = by_id.get(shard.id) or by_bytes.get((shard.identity.size, shard.identity.sha256))
        if other is None:
            comparison.only_a += shard.num_rows
            continue
        by_id.pop(other.id, None)
        pairs = _pairs_of(shard, other, comparison)
        num_pairs += len(pairs)
        yield shard.id, pairs
    comparison.only_b += sum(shard.num_rows for shard in by_id.values())
    if not num_pairs:
        raise RequestError(
            f"OUT_A {a.folder.url!r} and OUT_B {b.folder.url!r} have no image in common"
        )


def _pairs_of(a: ShardResult, b: ShardResult, comparison: Comparison) -> list[RowPair]:
    """Join two shards' rows by index and caption index; the image must be the same one."""
    others = {(row.ref.index, row.caption_index): row for row in b.rows()}
    pairs = []
    for row in a.rows():
        other = others.get((row.ref.index, row.caption_index))
        if other is None or other.facts.sha256 != row.facts.sha256:
            comparison.only_a += 1
            continue
        del others[row.ref.index, row.caption_index]
        pairs.append(RowPair(row, other, overlap_of(row.caption or "", other.caption or "")))
    comparison.only_b += len(others)
    return pairs


def overlap_of(one: str, other: str) -> float:
    """Return the F1 of the words of two texts, whatever their order."""
    words, others = Counter(tokenise(one)), Counter(tokenise(other))
    total = sum(words.values()) + sum(others.values())
    if not total:
        return 1.0 if one == other else 0.0
    return 2 * sum((words & others).values()) / total
