"""The ids that slots have chosen, kept on the device: the next step and the sampler read them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

NOTHING = -1


class Said:
    """Each slot's newest id, `last` int64 `[N]`, and all ids of its caption where they are needed.

    `every` is int64 `[N, M]`, `NOTHING` behind a caption's last id; None unless a penalty on
    repeating looks at it.
    """

    def __init__(self, num_slots: int, num_kept: int, device: torch.device) -> None:
        self.last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.every: Tensor | None = None
        if num_kept:
            self.every = torch.full_like(self.last, NOTHING)[:, None].repeat(1, num_kept)
        self._rows = torch.arange(num_slots, device=device)

    def start(
        self, slots: Tensor, ids: Tensor, before: Tensor | None, places: Tensor | None
    ) -> None:
        """Note the ids `[B]` that a prefill chose for slots `[B]`.

        `before` `[B, M]` are the ids of captions that were begun already, and `places` `[B]`
        where they go on; None where nobody looks at them.
        """
        self.last.index_copy_(0, slots, ids)
        if self.every is not None and before is not None and places is not None:
            self.every.index_copy_(0, slots, before.scatter(1, places[:, None], ids[:, None]))

    def go_on(self, ids: Tensor, places: Tensor | None) -> None:
        """Note the ids `[B]` that a step chose for the first slots; `places` as in `start`."""
        rows = len(ids)
        self.last[:rows].copy_(ids)
        if self.every is not None and places is not None:
            self.every.index_put_((self._rows[:rows], places), ids)

    def move(self, source: int, target: int) -> None:
        """Follow a sequence into another slot."""
        self.last[target] = self.last[source]
        if self.every is not None:
            self.every[target] = self.every[source]


def said_so_far(token_ids: Rows[Rows[int]], num_kept: int) -> Tensor:
    """Return captions as `every` holds them, `[B, num_kept]`, on the host."""
    rows = [[*ids, *[NOTHING] * (num_kept - len(ids))] for ids in token_ids]
    return torch.tensor(rows, dtype=torch.int64)
