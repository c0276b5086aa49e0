"""The KV cache: keys and values of every live sequence, allocated once.

            columns 0 .. S - 1
    slot 0  A A A A A A a a a -  ╮   A: prompt, a: caption so far, -: not yet used
    slot 1  B B B B b b b b - -  ╯ a group attends over 9 columns
    slot 2  C C C c c - - - - -  ╮
    slot 3  D D D d - - - - - -  ╯ the next one over 5
    slot 4  (free)

A slot holds real tokens only: left padding is dropped on admission, so column = position and
a row of the decode step needs nothing but its own length. Live slots are always the first
ones, which makes a step over them a slice and no gather; `move` closes a gap. They stand about
in the order of their lengths (see `Scheduler.gaps`), so that a group of neighbours need not
read as many columns as the longest sequence of all has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.engine.device import upload
from pipeline.engine.padding import PrefillBatch
from pipeline.kernels.decode import StepAttention, can_attend
from pipeline.models.attention import RopeTables, attend, rotated
from pipeline.models.language import DecoderSpec

COLUMN_BLOCK = 16
GROUP_SLOTS = 16


class KVCache:
    """Keys and values `[L, N, S, K, D]`, each slot's length, and the views that attention gets.

    A token's heads lie together: what a step adds to a slot is one piece of memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_slots: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (spec.num_layers, num_slots, num_columns, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: a masked column has weight 0, and 0 times garbage may be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_slots
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.device = device

    @property
    def num_slots(self) -> int:
        """N, live or free."""
        return len(self.lengths)

    @property
    def num_columns(self) -> int:
        """S: the longest prompt and caption that fit together."""
        return self.keys.shape[2]

    def prefill_view(self, slots: Sequence[int], batch: PrefillBatch) -> PrefillView:
        """Take the prompts of a batch into these slots, one a row."""
        for slot, length in zip(slots, batch.lengths, strict=True):
            self.lengths[slot] = length
        return PrefillView(self, slots, batch)

    def decode_view(self, num_rows: int) -> DecodeView:
        """Offer room for one token more in each of the first `num_rows` slots."""
        return DecodeView(self, num_rows)

    def advance(self, slots: Iterable[int]) -> None:
        """Count the token that a whole decode step has put into each of these slots."""
        for slot in slots:
            self.lengths[slot] += 1

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's sequence into another slot."""
        length = self.lengths[source]
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]
        self.lengths[target] = length

    def move(self, source: int, target: int) -> None:
        """Move a slot's sequence into a free slot."""
        assert self.lengths[target] == 0, "a live slot would be overwritten"
        self.copy(source, target)
        self.free(source)

    def free(self, slot: int) -> None:
        """Give a slot back; what it held stays until it is overwritten, and is never seen."""
        self.lengths[slot] = 0

    def wipe(self, slot: int) -> None:
        """Zero a slot whose numbers are not finite, which even a mask would not hide."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0


class PrefillView:
    """A prefill's door to the cache: the prompts attend among themselves, padding is dropped."""

    def __init__(self, cache: KVCache, slots: Sequence[int], batch: PrefillBatch) -> None:
        self._cache = cache
        # Found on the host: a device that was asked which places are real would have to answer.
        real = batch.is_real.flatten().nonzero()[:, 0]
        slot_of_row = torch.tensor(list(slots))
        self._slots = upload(slot_of_row[real // batch.is_real.shape[1]], cache.device)
        self._real = upload(real, cache.device)
        self._columns = batch.positions.flatten().index_select(0, self._real)
        self._is_padded = batch.num_padding_tokens > 0

    def attend(self, layer: int, heads: Tensor, tables: RopeTables, bias: Tensor) -> Tensor:
        """Store the real tokens of `[B, T, H + 2 K, D]`; attend over the batch as it came."""
        queries, keys, values = rotated(heads, tables, self._cache.num_kv_heads)
        for stored, new in ((self._cache.keys, keys), (self._cache.values, values)):
            tokens = new.transpose(1, 2).flatten(0, 1)
            if self._is_padded:
                tokens = tokens.index_select(0, self._real)
            stored[layer][self._slots, self._columns] = tokens
        return attend(queries, keys, values, bias)


class StepView:
    """A decode step's door to the cache: one token a row goes in, each row sees its slot.

    Lengths `[B]` lie on the device: no value of a step, but its shape, is the host's.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, num_columns: int) -> None:
        self._cache = cache
        self._lengths = lengths
        self._num_columns = num_columns
        self._rows = torch.arange(len(lengths), device=lengths.device)

    @property
    def positions(self) -> Tensor:
        """The new tokens' positions `[B, 1]`: each row's own length."""
        return self._lengths[:, None]

    @property
    def mask(self) -> Tensor:
        """The bool mask `[B, 1, 1, S]` of a step: all that a row holds, the new token included."""
        columns = torch.arange(self._num_columns, device=self._lengths.device)
        return (columns <= self._lengths[:, None])[:, None, None]

    def attend(self, layer: int, heads: Tensor, tables: RopeTables, bias: Tensor) -> Tensor:
        """Store `[B, 1, H + 2 K, D]` behind each row's tokens; attend over the slots in place."""
        stored = self._cache.keys[layer], self._cache.values[layer]
        queries, *new = rotated(heads, tables, self._cache.num_kv_heads)
        for kept, these in zip(stored, new, strict=True):
            kept[self._rows, self._lengths] = these[:, :, 0]
        return self._attend(queries, *stored, bias)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        rows = slice(len(self._rows))
        return _attend_over(queries, keys, values, bias, rows, self._num_columns)


class DecodeView(StepView):
    """The same on a processor: in kernels of our own, or each group over its own columns."""

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        lengths = cache.lengths[:num_rows]
        self._groups = [
            (slice(first, last), columns_for(max(lengths[first:last]), COLUMN_BLOCK, cache))
            for first, last in pairwise(group_borders(num_rows, cache.device))
        ]
        num_columns = max(columns for _, columns in self._groups)
        super().__init__(cache, torch.tensor(lengths, device=cache.device), num_columns)
        kernels = can_attend(cache.keys)
        self._fused = StepAttention(kernels, self._lengths, cache.num_heads) if kernels else None

    def attend(self, layer: int, heads: Tensor, tables: RopeTables, bias: Tensor) -> Tensor:
        """Store and attend as `StepView` does, in one pass where there are kernels for it."""
        if self._fused is None:
            return super().attend(layer, heads, tables, bias)
        stored = self._cache.keys[layer], self._cache.values[layer]
        return self._fused.attend(heads, tables.cos, tables.sin, *stored)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        mixed = [_attend_over(queries, keys, values, bias, *group) for group in self._groups]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _attend_over(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, rows: slice, columns: int
) -> Tensor:
    """Attend from some rows over the first columns of their slots."""
    keys, values = (kept[rows, :columns].transpose(1, 2) for kept in (keys, values))
    return attend(queries[rows], keys, values, bias[rows, :, :, :columns])


def columns_for(length: int, block: int, cache: KVCache) -> int:
    """Return how many columns a step reads: in blocks, so that shapes repeat from step to step."""
    return min((length // block + 1) * block, cache.num_columns)


def group_borders(num_rows: int, device: torch.device) -> list[int]:
    """Return where groups of rows begin, and where the last one ends.

    Elsewhere than on a processor a step is one group: many rows at once matter more there.
    """
    group = GROUP_SLOTS if device.type == "cpu" else num_rows
    return [*range(0, num_rows, group), num_rows]
