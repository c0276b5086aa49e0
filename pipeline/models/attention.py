"""Rotary positions and grouped-query attention, and what they ask of a KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValues(Protocol):
    """What attention needs of a cache: give it the new tokens, get all that they may see."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `[B, K, T, D]` of one layer and return the `[B, K, S, D]` to attend over."""
        ...


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that a network was trained on.

    `kind` is `linear` (all frequencies divided by `factor`), `llama3` (only the slow ones:
    Llama 3.1, https://arxiv.org/abs/2407.21783), or `overflow`: nanoVLM divides by
    `(longest position + 1) / max_positions` in any call that goes beyond `max_positions`. The
    scale is each row's own, so that no neighbour in the batch picks it.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the `[D / 2]` rotary frequencies in float32 (https://arxiv.org/abs/2104.09864).

    float32 on purpose: it is what every checkpoint was trained with, and float64 would differ.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: Tensor = 1.0 / (theta**exponents)
    if scaling is None or scaling.kind == "overflow":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slow = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    is_medium = (wavelengths >= high) & (wavelengths <= low)
    return torch.where(is_medium, blended, slow)


def rope_tables(
    positions: Tensor, frequencies: Tensor, *, overflow_limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each `[B, 1, T, D / 2]`, for positions `[B, T]`.

    They are computed in float32 whatever the network's dtype, since bfloat16 cannot tell
    position 257 from 258; float64 only where the frequencies are float64.
    """
    angles = positions.to(frequencies.dtype)[:, :, None] * frequencies
    if overflow_limit is not None:
        longest = positions.amax(dim=1).to(frequencies.dtype) + 1
        scale = (longest / overflow_limit).clamp(min=1.0)
        angles = positions.to(frequencies.dtype)[:, :, None] * (frequencies / scale[:, None, None])
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[B, H, T, D]` in half-split form: element i is paired with i + D / 2."""
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with grouped queries; returns `[B, H, T, D]`.

    queries `[B, H, T, D]`, keys and values `[B, K, S, D]` with H a multiple of K, mask bool
    `[B, 1, T, S]` (True: may see; no row of it may be empty).
    """
    if queries.shape[2] == 1:
        return _attend_one(queries, keys, values, mask)
    num_groups = queries.shape[1] // keys.shape[1]
    if num_groups > 1:
        keys = keys.repeat_interleave(num_groups, dim=1)
        values = values.repeat_interleave(num_groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _attend_one(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend from one token a row: query groups stand in for the query length.

    Keys and values are read where they lie in the cache, neither expanded to the query heads
    nor copied, which is what a decode step spends its time on otherwise.
    """
    batch, num_heads, _, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # A strided slice times its transpose is copied element by element; row by row is faster.
    transposed = keys.contiguous().transpose(-1, -2)
    scores = torch.matmul(grouped * head_dim**-0.5, transposed)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1).to(values.dtype)
    return torch.matmul(weights, values).view(batch, num_heads, 1, head_dim)
