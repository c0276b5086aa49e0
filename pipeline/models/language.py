"""The llama-type decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It holds no state between calls. Keys and values of earlier tokens come from whatever stands
behind `KeyValues`, so the same forward serves a whole prompt without a cache, a left-padded
prefill, and a decode step of one token a row.

Words: B rows, T tokens of this call, S tokens attended over, C width, H query heads,
K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.decode import rms_norm
from pipeline.kernels.linear import can_pack
from pipeline.kernels.pages import LargePages
from pipeline.models.attention import (
    KeyValues,
    RopeScaling,
    RopeTables,
    attend,
    attention_bias,
    rope_frequencies,
    rope_tables,
    rotated,
)
from pipeline.models.linear import GatedLinear, LaysOut, Linear
from pipeline.models.matrices import BlockedMatrix, Matrix, TiledMatrix, can_block


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The sizes of a decoder, from a checkpoint's config."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_positions: int = 8192
    is_head_tied: bool = True
    rope_scaling: RopeScaling | None = None

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take: 2 x L x K x D x bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class RMSNorm(nn.Module):
    """Root mean square norm (https://arxiv.org/abs/1910.07467), its statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `[..., C]`."""
        fused = rms_norm(x, self.weight, self.eps)
        if fused is not None:
            return fused
        wide = torch.promote_types(x.dtype, torch.float32)
        if wide == x.dtype or x.device.type == "cuda":
            # One kernel of a GPU, in float32 inside; what follows would be eight.
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = norms.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        # Rounded once, behind the weight, which keeps half precision closer to float32.
        normed: Tensor = (x * scale).mul_(self.weight).to(x.dtype)
        return normed


class DecoderBlock(nn.Module):
    """One pre-norm block; the projections of q, k, v and of gate, up are one matrix each."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(width, spec.norm_eps)
        self.qkv = Linear(width, heads + 2 * kv_width, bias=False)
        self.out = Linear(heads, width, bias=False)
        self.mlp_norm = RMSNorm(width, spec.norm_eps)
        self.gate_up = GatedLinear(width, spec.intermediate_size)
        self.down = Linear(spec.intermediate_size, width, bias=False)

    def forward(
        self,
        x: Tensor,
        tables: RopeTables,
        bias: Tensor,
        layer: int,
        kv: KeyValues | None,
    ) -> Tensor:
        """Run `[B, T, C]` through attention and the gated MLP."""
        x = self.out.added(self._attention(self.attention_norm(x), tables, bias, layer, kv), x)
        return self.down.added(self.gate_up(self.mlp_norm(x)), x)

    def _attention(
        self,
        x: Tensor,
        tables: RopeTables,
        bias: Tensor,
        layer: int,
        kv: KeyValues | None,
    ) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim)
        if kv is None:
            return attend(*rotated(heads, tables, self.num_kv_heads), bias)
        return kv.attend(layer, heads, tables, bias)


class LlamaDecoder(nn.Module, LaysOut):
    """Token embedding, blocks, final norm and head; the head is the embedding where tied."""

    _tied_head: Matrix | None = None

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(DecoderBlock(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        if not spec.is_head_tied:
            self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._frequencies: Tensor | None = None

    def lay_out(self) -> None:
        """Pack matrices; keep a second copy of a tied embedding, which is looked up, too."""
        room = LargePages()
        for module in self.modules():
            if isinstance(module, Linear | GatedLinear):
                module.pack(room)
        weight = self.embedding.weight
        if not self.spec.is_head_tied or self._tied_head is not None:
            return
        if can_pack(weight):
            self._tied_head = TiledMatrix(weight, None, room)
        elif can_block(weight):
            self._tied_head = BlockedMatrix(weight, None)

    def _frequencies_like(self, weight: Tensor) -> Tensor:
        # Not a buffer: `.to(bfloat16)` would round it, and building on the meta device lose it.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        known = self._frequencies
        if known is None or known.device != weight.device or known.dtype != dtype:
            spec = self.spec
            exact = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
            known = self._frequencies = exact.to(weight.device, dtype)
        return known

    def embed(self, ids: Tensor) -> Tensor:
        """Look up `[B, T]` ids; returns `[B, T, C]`."""
        embedded: Tensor = self.embedding(ids)
        return embedded

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, kv: KeyValues | None = None
    ) -> Tensor:
        """Run embedded tokens `[B, T, C]` at positions `[B, T]`; returns `[B, T, C]`, normed.

        mask is bool `[B, 1, T, S]`, True where a query may see a key. Without `kv`, S is T.
        """
        scaling = self.spec.rope_scaling
        is_overflow = scaling is not None and scaling.kind == "overflow"
        limit = self.spec.max_positions if is_overflow else None
        frequencies = self._frequencies_like(self.embedding.weight)
        tables = rope_tables(positions, frequencies, overflow_limit=limit)
        bias = attention_bias(mask, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, tables, bias, layer, kv)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary for `[..., C]`; returns `[..., V]`."""
        if not self.spec.is_head_tied:
            scores: Tensor = self.head(hidden)
            return scores
        if self._tied_head is not None:
            return self._tied_head(hidden)
        return F.linear(hidden, self.embedding.weight)
