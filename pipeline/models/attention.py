"""Rotary positions and grouped-query attention, and what they ask of a KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and signed sines `[B, 1, T, D]` of each row's positions."""

    cos: Tensor
    sin: Tensor  # negative in the first half of the width


class KeyValues(Protocol):
    """What the decoder needs of a cache: give it the new tokens, get what they saw."""

    def attend(self, layer: int, heads: Tensor, tables: RopeTables, bias: Tensor) -> Tensor:
        """Store one layer's new keys and values, and attend; returns `[B, T, H D]`.

        heads `[B, T, H + 2 K, D]` are queries, keys and values, not yet rotated; bias
        `[B, 1, T, S]` covers the S columns that may be seen.
        """
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
) -> RopeTables:
    """Return the tables of positions `[B, T]`.

    They are computed in float32 whatever the network's dtype, since bfloat16 cannot tell
    position 257 from 258; float64 only where the frequencies are float64.
    """
    angles = positions.to(frequencies.dtype)[:, :, None] * frequencies
    if overflow_limit is not None:
        longest = positions.amax(dim=1).to(frequencies.dtype) + 1
        scale = (longest / overflow_limit).clamp(min=1.0)
        angles = positions.to(frequencies.dtype)[:, :, None] * (frequencies / scale[:, None, None])
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return RopeTables(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(heads: Tensor, tables: RopeTables) -> Tensor:
    """Rotate `[B, H, T, D]` in half-split form: element i is paired with i + D / 2."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * tables.cos, partners, tables.sin).to(heads.dtype)


def rotated(heads: Tensor, tables: RopeTables, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart: `[B, T, H + 2 K, D]` to `[B, H or K, T, D]` each."""
    # Queries and keys turn by the same angles: together, in half as many operations.
    num_turning = heads.shape[2] - num_kv_heads
    turning, values = torch.split(heads.transpose(1, 2), [num_turning, num_kv_heads], dim=1)
    turned = rotate(turning, tables)
    queries, keys = torch.split(turned, [num_turning - num_kv_heads, num_kv_heads], dim=1)
    return queries, keys, values


def attention_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask `[B, 1, T, S]` (True: may see) into what is added to scores: 0 or -inf.

    Made once for all layers, which each would otherwise make it for themselves.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attend with grouped queries; returns `[B, T, H D]`.

    queries `[B, H, T, D]`, keys and values `[B, K, S, D]` with H a multiple of K, bias
    `[B, 1, T, S]` (see `attention_bias`; no row of it may hide everything).

    The heads that share keys stand in for G times as many tokens, `[B, K, G T, D]`. Keys and
    values so are read where they lie in the cache, neither repeated for each head nor copied.
    """
    batch, num_heads, length, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_groups = num_heads // num_kv_heads
    grouped = queries.reshape(batch, num_kv_heads, num_groups * length, head_dim)
    if length > 1 and num_groups > 1:
        bias = bias.repeat(1, 1, num_groups, 1)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias)
    by_token = mixed.view(batch, num_heads, length, head_dim).transpose(1, 2)
    return by_token.reshape(batch, length, num_heads * head_dim)
