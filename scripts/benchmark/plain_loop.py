"""A key-value cache as it is first written: what nanoVLM's own generate does, in our own words.

Keys and values grow by `cat` at every step, they are repeated for all query heads, an additive
mask is made anew in each layer, every projection is a product of its own, and all rows run to
the greatest length whether or not they have ended, with one pass more than there are tokens. The
numbers are the same; only the way there is the plain one. The tower sees a whole batch at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models.attention import rope_frequencies
from pipeline.models.language import DecoderBlock, RMSNorm
from pipeline.models.vision import VisionBlock, position_ids
from pipeline.models.vlm import VisionLanguageModel
from scripts.benchmark.shapes import EOS_ID, NetworkShape
from scripts.benchmark.workload import Workload, left_padded, scaled_pixels, until_end

Cache = list[tuple[Tensor, Tensor]]


class PlainLoop:
    """Weights of our own network, run plainly."""

    def __init__(self, shape: NetworkShape, model: VisionLanguageModel) -> None:
        self._shape = shape
        self._model = model
        self._tower = model.get_submodule("vision")
        self._dtype = model.decoder.embedding.weight.dtype
        self._frequencies = rope_frequencies(shape.decoder.head_dim, shape.decoder.rope_theta, None)

    @torch.inference_mode()
    def generate(self, batch: Workload) -> dict[int, tuple[int, ...]]:
        """Caption one static batch, all rows to the greatest length."""
        ids, mask = left_padded(batch.requests, EOS_ID)
        x = self._model.decoder.embedding(ids)
        features = self._encode(scaled_pixels(self._shape, batch.requests).to(self._dtype))
        x[ids == self._shape.image_token_id] = features.flatten(0, 1)
        cache: Cache = []
        hidden = self._decoder(x, mask, cache)
        chosen: list[Tensor] = []
        for _ in range(batch.max_new_tokens):
            token = F.linear(hidden[:, -1], self._model.decoder.head.weight).argmax(-1)
            chosen.append(token)
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            hidden = self._decoder(self._model.decoder.embedding(token[:, None]), mask, cache)
        rows = torch.stack(chosen, dim=1).tolist()
        return {
            request.ref.index: until_end(row, EOS_ID, batch.max_new_tokens)
            for request, row in zip(batch.requests, rows, strict=True)
        }

    def _encode(self, pixels: Tensor) -> Tensor:
        """Return image tokens `[B, F, C]` of `[B, 3, S, S]`."""
        tower, spec = self._tower, self._shape.vision
        patches = F.conv2d(pixels, tower.patches.weight, tower.patches.bias, stride=spec.patch_size)
        side = patches.shape[-1]
        everywhere = torch.ones(len(pixels), side, side, dtype=torch.bool)
        x = patches.flatten(2).transpose(1, 2)
        x = x + tower.positions[position_ids(everywhere, spec.patches_per_side)]
        for block in tower.blocks:
            x = _vision_block(block, x)
        x = tower.norm(x)
        factor, width = self._shape.shuffle_factor, x.shape[-1]
        x = x.view(len(x), side // factor, factor, side // factor, factor, width)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), -1, factor * factor * width)
        return F.linear(x, self._model.get_submodule("projector").projection.weight)

    def _decoder(self, x: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Run `[B, T, C]`; mask is 1 or 0 `[B, S]` over all columns so far."""
        start = cache[0][0].shape[2] if cache else 0
        is_first = not cache
        angles = torch.arange(start, start + x.shape[1])[:, None] * self._frequencies
        cos = torch.cat((angles, angles), dim=-1).cos().to(x.dtype)
        sin = torch.cat((angles, angles), dim=-1).sin().to(x.dtype)
        for layer, block in enumerate(self._model.decoder.blocks):
            if is_first:
                empty = x.new_empty(len(x), block.num_kv_heads, 0, block.head_dim)
                cache.append((empty, empty))
            x = x + _attention(block, _norm(block.attention_norm, x), cos, sin, mask, cache, layer)
            inner = _norm(block.mlp_norm, x)
            gate, up = block.gate_up.weight.chunk(2)
            gated = F.silu(F.linear(inner, gate)) * F.linear(inner, up)
            x = x + F.linear(gated, block.down.weight)
        return _norm(self._model.decoder.norm, x)


def _vision_block(block: VisionBlock, x: Tensor) -> Tensor:
    rows, num_patches, width = x.shape
    norm, mlp_norm = block.attention_norm, block.mlp_norm
    inner = F.layer_norm(x, (width,), norm.weight, norm.bias, norm.eps)
    joined = F.linear(inner, block.qkv.weight, block.qkv.bias)
    queries, keys, values = (
        part.view(rows, num_patches, block.num_heads, -1).transpose(1, 2)
        for part in joined.chunk(3, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    mixed = mixed.transpose(1, 2).reshape(rows, num_patches, width)
    x = x + F.linear(mixed, block.out.weight, block.out.bias)
    inner = F.layer_norm(x, (width,), mlp_norm.weight, mlp_norm.bias, mlp_norm.eps)
    inner = F.gelu(F.linear(inner, block.up.weight, block.up.bias), approximate="tanh")
    return x + F.linear(inner, block.down.weight, block.down.bias)


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
    return (x.float() * scale).to(x.dtype) * norm.weight


def _attention(
    block: DecoderBlock,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    cache: Cache,
    layer: int,
) -> Tensor:
    batch, length, _ = x.shape
    kv_rows = block.num_kv_heads * block.head_dim
    weights = block.qkv.weight.split((block.num_heads * block.head_dim, kv_rows, kv_rows))
    queries, keys, values = (
        F.linear(x, weight).view(batch, length, -1, block.head_dim).transpose(1, 2)
        for weight in weights
    )
    queries = queries * cos + _half_turned(queries) * sin
    keys = keys * cos + _half_turned(keys) * sin
    known_keys, known_values = cache[layer]
    keys, values = torch.cat((known_keys, keys), dim=2), torch.cat((known_values, values), dim=2)
    cache[layer] = (keys, values)
    num_groups = block.num_heads // block.num_kv_heads
    allowed = (1.0 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
    if length > 1:
        # The lowest number, not minus infinity: a padded query would see nothing at all.
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = allowed.expand(-1, -1, length, -1).masked_fill(~causal, torch.finfo(x.dtype).min)
    mixed = F.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(num_groups, dim=1),
        values.repeat_interleave(num_groups, dim=1),
        attn_mask=allowed,
    )
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), block.out.weight)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
