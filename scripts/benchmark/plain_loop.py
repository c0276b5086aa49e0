"""A key-value cache as it is first written: what nanoVLM's own generate does, in our own words.

Keys and values grow by `cat` at every step, they are repeated for all query heads, an additive
mask is made anew in each layer, every projection is a product of its own, and all rows run to
the greatest length whether or not they have ended, with one pass more than there are tokens. The
numbers are the same; only the way there is the plain one. The tower sees a whole batch at once.

It reads the checkpoint's own tensors, and shares no code with the networks that it is set beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from scripts.benchmark.shapes import EOS_ID, NetworkShape
from scripts.benchmark.workload import Workload, left_padded, scaled_pixels, until_end

Cache = list[tuple[Tensor, Tensor]]
TOWER, TEXT = "model.vision_model", "model.text_model"


class PlainLoop:
    """A checkpoint's tensors, run plainly."""

    def __init__(
        self, shape: NetworkShape, folder: Path, dtype: torch.dtype, device: torch.device
    ) -> None:
        stored = load_file(folder / "model.safetensors")
        self._weights: Mapping[str, Tensor] = {n: t.to(device, dtype) for n, t in stored.items()}
        self._device = device
        self._shape = shape
        self._dtype = dtype
        spec = shape.decoder
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        self._frequencies = (1.0 / spec.rope_theta**exponents).to(device)

    @torch.inference_mode()
    def generate(self, batch: Workload) -> dict[int, tuple[int, ...]]:
        """Caption one static batch, all rows to the greatest length."""
        ids, mask = (each.to(self._device) for each in left_padded(batch.requests, EOS_ID))
        x = self._embed(ids)
        pixels = scaled_pixels(self._shape, batch.requests).to(self._device, self._dtype)
        features = self._encode(pixels)
        x[ids == self._shape.image_token_id] = features.flatten(0, 1)
        cache: Cache = []
        hidden = self._decoder(x, mask, cache)
        chosen: list[Tensor] = []
        for _ in range(batch.max_new_tokens):
            token = F.linear(hidden[:, -1], self._weights["lm_head.weight"]).argmax(-1)
            chosen.append(token)
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            hidden = self._decoder(self._embed(token[:, None]), mask, cache)
        rows = torch.stack(chosen, dim=1).tolist()
        return {
            request.ref.index: until_end(row, EOS_ID, batch.max_new_tokens)
            for request, row in zip(batch.requests, rows, strict=True)
        }

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weights[f"{TEXT}.embed_tokens.weight"])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _encode(self, pixels: Tensor) -> Tensor:
        """Return image tokens `[B, F, C]` of `[B, 3, S, S]`."""
        patch = f"{TOWER}.embeddings.patch_embedding"
        patches = F.conv2d(
            pixels,
            self._weights[f"{patch}.weight"],
            self._weights[f"{patch}.bias"],
            stride=self._shape.vision.patch_size,
        )
        side = patches.shape[-1]
        x = patches.flatten(2).transpose(1, 2)
        x = x + self._weights[f"{TOWER}.embeddings.position_embedding.weight"]
        for layer in range(self._shape.vision.num_layers):
            x = self._tower_block(f"{TOWER}.encoder.layers.{layer}", x)
        x = self._layer_norm(f"{TOWER}.post_layernorm", x)
        factor, width = self._shape.shuffle_factor, x.shape[-1]
        x = x.view(len(x), side // factor, factor, side // factor, factor, width)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), -1, factor * factor * width)
        return self._linear("model.connector.modality_projection.proj", x)

    def _tower_block(self, name: str, x: Tensor) -> Tensor:
        rows, num_patches, width = x.shape
        inner = self._layer_norm(f"{name}.layer_norm1", x)
        queries, keys, values = (
            self._linear(f"{name}.self_attn.{part}_proj", inner)
            .view(rows, num_patches, self._shape.vision.num_heads, -1)
            .transpose(1, 2)
            for part in "qkv"
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        mixed = mixed.transpose(1, 2).reshape(rows, num_patches, width)
        x = x + self._linear(f"{name}.self_attn.out_proj", mixed)
        inner = self._linear(f"{name}.mlp.fc1", self._layer_norm(f"{name}.layer_norm2", x))
        return x + self._linear(f"{name}.mlp.fc2", F.gelu(inner, approximate="tanh"))

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self._shape.vision.norm_eps)

    def _decoder(self, x: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Run `[B, T, C]`; mask is 1 or 0 `[B, S]` over all columns so far."""
        spec = self._shape.decoder
        start = cache[0][0].shape[2] if cache else 0
        if not cache:
            empty = x.new_empty(len(x), spec.num_kv_heads, 0, spec.head_dim)
            cache += [(empty, empty)] * spec.num_layers
        places = torch.arange(start, start + x.shape[1], device=self._device)
        angles = places[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        tables = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in range(spec.num_layers):
            name = f"{TEXT}.layers.{layer}"
            inner = self._rms_norm(f"{name}.input_layernorm", x)
            x = x + self._attention(f"{name}.self_attn", inner, tables, mask, cache, layer)
            inner = self._rms_norm(f"{name}.post_attention_layernorm", x)
            gate = F.silu(self._linear(f"{name}.mlp.gate_proj", inner))
            gated = gate * self._linear(f"{name}.mlp.up_proj", inner)
            x = x + self._linear(f"{name}.mlp.down_proj", gated)
        return self._rms_norm(f"{TEXT}.norm", x)

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        squares = x.float().square().mean(-1, keepdim=True)
        normed = x.float() * torch.rsqrt(squares + self._shape.decoder.norm_eps)
        return normed.to(x.dtype) * self._weights[f"{name}.weight"]

    def _attention(
        self,
        name: str,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: Cache,
        layer: int,
    ) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", x)
            .view(batch, length, -1, self._shape.decoder.head_dim)
            .transpose(1, 2)
            for part in "qkv"
        )
        queries, keys = _turned(queries, *tables), _turned(keys, *tables)
        known_keys, known_values = cache[layer]
        keys = torch.cat((known_keys, keys), dim=2)
        values = torch.cat((known_values, values), dim=2)
        cache[layer] = (keys, values)
        num_groups = self._shape.decoder.num_heads // self._shape.decoder.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(num_groups, dim=1),
            values.repeat_interleave(num_groups, dim=1),
            attn_mask=_additive(mask, length, x.dtype),
        )
        return self._linear(f"{name}.o_proj", mixed.transpose(1, 2).reshape(batch, length, -1))


def _additive(mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Make the mask that is added to scores, `[B, 1, T, S]` or `[B, 1, 1, S]`."""
    # The lowest number, not minus infinity: a padded query would see nothing at all.
    lowest = torch.finfo(dtype).min
    allowed = (1.0 - mask[:, None, None].to(dtype)) * lowest
    if length == 1:
        return allowed
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return allowed.expand(-1, -1, length, -1).masked_fill(~causal, lowest)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return x * cos + half * sin
