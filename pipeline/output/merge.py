"""Pieces of one shard to one table in order, with memory for their overlap alone.

piece 1   0 1 2 4 7          sequences finish when they finish, so pieces overlap a little;
piece 2   3 5 6 8 9 11       what lies below the first index of the next piece is in its
piece 3   10 12 13           final order and can be written
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

ROW_GROUP = 8192  # rows; fixed, so that equal rows make equal files


@dataclass(frozen=True, slots=True)
class Part:
    """Some finished samples of a shard: the lowest index among them, and how to get the rows."""

    first_index: int
    read: Callable[[], pa.Table]


def merged(parts: Sequence[Part]) -> Iterator[pa.Table]:
    """Yield all rows of `parts` by (index, caption index), in tables of `ROW_GROUP` rows.

    Each part is in that order. Where two hold the same index, which twins do, the first wins.
    """
    ready: list[pa.Table] = []
    num_ready = 0
    for table in _in_order(sorted(parts, key=lambda part: part.first_index)):
        ready.append(table)
        num_ready += table.num_rows
        if num_ready >= ROW_GROUP:
            joined = pa.concat_tables(ready)
            whole = num_ready - num_ready % ROW_GROUP
            yield from (joined.slice(start, ROW_GROUP) for start in range(0, whole, ROW_GROUP))
            ready, num_ready = [joined.slice(whole)], num_ready - whole
    if num_ready:
        yield pa.concat_tables(ready)


def _in_order(parts: Sequence[Part]) -> Iterator[pa.Table]:
    held: pa.Table | None = None
    for place, part in enumerate(parts):
        table = part.read()
        held = _ordered(table if held is None else pa.concat_tables([held, table]), held)
        index = held.column("index").to_numpy()
        is_last = place + 1 == len(parts)
        end = len(index) if is_last else np.searchsorted(index, parts[place + 1].first_index)
        yield held.slice(0, int(end))
        held = held.slice(int(end))


def _ordered(table: pa.Table, held: pa.Table | None) -> pa.Table:
    """Sort by index, and drop the second part's rows where the first has the same index."""
    index = table.column("index").to_numpy()
    is_second = np.arange(len(index)) >= (0 if held is None else held.num_rows)
    # Within a part, the rows of one index are in the order of their caption index already.
    order = np.lexsort((np.arange(len(index)), is_second, index))
    if held is not None and held.num_rows:
        twice = np.intersect1d(index[~is_second], index[is_second])
        order = order[~(is_second[order] & np.isin(index[order], twice))]
    return table.take(pa.array(order))
