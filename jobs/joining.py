"""Which result belongs to which shard, and which rows to which image: never by name alone.

A shard that was moved has another id; then its size and the hash of its head and tail decide.
Within a shard a row belongs to the image member of its index, whose key, member name and hash
must be the ones in the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jobs.results import Output, ShardResult
from pipeline.errors import RequestError, ShardError
from pipeline.input.identity import identify
from pipeline.input.reader import ReaderSettings, read_shard
from pipeline.input.shards import expand_shards, with_columns
from pipeline.records import Row, Sample, Shard

NO_FIELDS = ReaderSettings(frozenset())


@dataclass(frozen=True, slots=True)
class Pair:
    """A shard and the rows that were made from it."""

    shard: Shard
    result: ShardResult


@dataclass(frozen=True, slots=True)
class Join:
    """The shards that were asked for, against the results that are there."""

    pairs: tuple[Pair, ...]
    without_result: tuple[Shard, ...]
    without_shard: tuple[ShardResult, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The complement of a set of indices, which is what a reader is to skip."""

    indices: frozenset[int]

    def __contains__(self, index: object) -> bool:
        return index not in self.indices


def join_shards(output: Output, patterns: Sequence[str]) -> Join:
    """Match shards to results, in the shards' order; nothing is read of a shard found by id."""
    by_id = {result.id: result for result in output.shards}
    shards = with_columns(expand_shards(patterns), output.columns)
    found = {shard.id: by_id.pop(shard.id) for shard in shards if shard.id in by_id}
    by_bytes = {(one.identity.size, one.identity.sha256): one for one in by_id.values()}
    for shard in shards:
        if shard.id not in found and by_bytes and _may_match(shard, by_bytes):
            moved = _moved(shard, by_bytes)
            if moved:
                found[shard.id] = moved
    taken = {result.id for result in found.values()}
    return Join(
        tuple(Pair(shard, found[shard.id]) for shard in shards if shard.id in found),
        tuple(shard for shard in shards if shard.id not in found),
        tuple(result for result in output.shards if result.id not in taken),
    )


def need_shards(join: Join) -> Join:
    """Return the join; RequestError where not one shard has a result."""
    if not join.pairs:
        raise RequestError("--shards: none of these shards has rows in OUT; wanted the job's own")
    return join


def joined_rows(
    pair: Pair, rows: Iterable[Row], settings: ReaderSettings = NO_FIELDS
) -> Iterator[tuple[Sample, list[Row]]]:
    """Yield the images of a shard in order, each with those of `rows` that are its own.

    Raises ShardError for a damaged shard, and for an image that is not the one of its rows.
    """
    by_index: dict[int, list[Row]] = {}
    for row in rows:
        by_index.setdefault(row.ref.index, []).append(row)
    if not by_index:
        return
    num_left = len(by_index)
    for sample in read_shard(pair.shard, settings, skip=Wanted(frozenset(by_index))):
        mine = by_index[sample.ref.index]
        difference = difference_of(sample, mine[0])
        if difference:
            raise ShardError(
                pair.shard.url, f"index {sample.ref.index} is not the row's image: {difference}"
            )
        yield sample, mine
        num_left -= 1
        if not num_left:
            return  # what follows is nobody's: a shard of gigabytes is not read to its end
    raise ShardError(pair.shard.url, f"{num_left} rows have no image in it")


def difference_of(sample: Sample, row: Row) -> str:
    """Say what of a sample is not as its row has it, or ``""``."""
    if sample.ref.key != row.ref.key and _encodable(sample.ref.key) != row.ref.key:
        return f"key {sample.ref.key!r}, the row has {row.ref.key!r}"
    if sample.ref.member != row.ref.member and _encodable(sample.ref.member) != row.ref.member:
        return f"member {sample.ref.member!r}, the row has {row.ref.member!r}"
    found = sha256_of(sample.data)
    if found != row.facts.sha256:
        return f"image hash {found[:12] or 'none'}, the row has {row.facts.sha256[:12] or 'none'}"
    return ""


def sha256_of(data: bytes) -> str:
    """Return the hash that a row has of an image's bytes: none where there are no bytes."""
    return hashlib.sha256(data).hexdigest() if data else ""


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _may_match(shard: Shard, by_bytes: dict[tuple[int, str], ShardResult]) -> bool:
    return any(size == shard.size for size, _ in by_bytes)


def _moved(shard: Shard, by_bytes: dict[tuple[int, str], ShardResult]) -> ShardResult | None:
    try:
        identity = identify(shard)
    except ShardError:
        return None
    return by_bytes.pop((identity.size, identity.sha256), None)
