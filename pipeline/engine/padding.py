"""Left padding: many prompts of different lengths as one rectangle.

    ids          . . . a b      positions   0 0 0 0 1      `.` is padding
                 c d e f g                  0 1 2 3 4

The last column then holds every row's last token, so one slice gives all next tokens. A
query sees the real keys up to itself; a padded query sees itself alone, since a softmax over
nothing is NaN, and NaN spreads. Positions are each row's own: padding never shifts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.device import upload


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompts ready for one forward: ids and positions int64 `[B, T]`, mask bool `[B, 1, T, T]`.

    `is_real` `[B, T]` is False on padding, and stays on the host; `lengths` are the prompts' own.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    is_real: Tensor
    lengths: tuple[int, ...]

    @property
    def num_padding_tokens(self) -> int:
        """How many places of the rectangle hold no token."""
        return self.ids.numel() - sum(self.lengths)


def left_pad(
    prompts: Sequence[Sequence[int]], device: torch.device, *, min_columns: int = 0
) -> PrefillBatch:
    """Pad prompts on the left to the longest of them, or to `min_columns` if that is more."""
    lengths = tuple(len(prompt) for prompt in prompts)
    assert min(lengths) >= 1, "an empty prompt has no last token to continue from"
    columns = max(*lengths, min_columns)
    rows = [[0] * (columns - len(prompt)) + list(prompt) for prompt in prompts]
    starts = columns - torch.tensor(lengths)
    is_real = torch.arange(columns) >= starts[:, None]
    is_real_there = upload(is_real, device)
    return PrefillBatch(
        ids=upload(torch.tensor(rows, dtype=torch.int64), device),
        positions=(is_real_there.cumsum(dim=-1) - 1).clamp(min=0),
        mask=prefill_mask(is_real_there),
        is_real=is_real,
        lengths=lengths,
    )


def prefill_mask(is_real: Tensor) -> Tensor:
    """Make the bool mask `[B, 1, T, T]` of `is_real` `[B, T]`: causal, real keys, and oneself."""
    columns, device = is_real.shape[1], is_real.device
    causal = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
    oneself = torch.eye(columns, dtype=torch.bool, device=device)
    return ((causal & is_real[:, None, :]) | oneself)[:, None]
