"""The vision transformer of every family here: nanoVLM, SigLIP, Idefics3 / SmolVLM, CLIP.

Pre-norm blocks over square patches with learned positions (https://arxiv.org/abs/2010.11929).
What differs is in `VisionSpec`: a class token and a norm before the blocks (CLIP), the
activation, and which blocks' outputs are the features.

Words: I images or tiles, P patches (and the class token), C width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.attention import attend_to_all
from pipeline.kernels.tower import layer_norm
from pipeline.models.linear import Linear


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The sizes of a vision transformer, from a checkpoint's config.

    `feature_layers` names the outputs that become features, joined along the width: 0 is the
    input of the first block, `num_layers` the output of the last one, each without the final
    norm. Where it is empty, the features are the last block's output after the final norm.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    has_class_token: bool = False  # CLIP: also no bias on the patches, and a norm before block 0
    drops_first: bool = False  # LLaVA leaves out the first feature: CLIP's class token
    spreads_positions: bool = False  # Idefics3: each tile's patches over the whole position grid
    feature_layers: tuple[int, ...] = ()

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of the square image that positions were learned for."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """Rows of the position table."""
        return self.patches_per_side**2 + int(self.has_class_token)

    @property
    def num_blocks(self) -> int:
        """Blocks that have to run: those after the last feature layer are never built."""
        return max(self.feature_layers) if self.feature_layers else self.num_layers

    @property
    def feature_size(self) -> int:
        """Width of a feature vector."""
        return self.hidden_size * max(1, len(self.feature_layers))


class VisionBlock(nn.Module):
    """One pre-norm block; q, k and v are one matrix."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        self.num_heads = spec.num_heads
        self.activation = spec.activation
        self.attention_norm = nn.LayerNorm(width, spec.norm_eps)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, spec.norm_eps)
        self.up = Linear(width, spec.intermediate_size)
        self.down = Linear(spec.intermediate_size, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Run `[I, P, C]`; mask is bool `[I, 1, 1, P]`, True where a patch may be seen."""
        x = self.out.added(self._attention(layer_norm(x, self.attention_norm), mask), x)
        up = self.up.activated(layer_norm(x, self.mlp_norm), self.activation)
        return self.down.added(up, x)

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        num_images, num_patches, width = x.shape
        heads = self.qkv(x).view(num_images, num_patches, 3, self.num_heads, -1)
        fused = attend_to_all(heads, mask)
        if fused is not None:
            return fused
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return mixed.transpose(1, 2).reshape(num_images, num_patches, width)


class VisionTransformer(nn.Module):
    """Patches, positions, blocks, and the features that `VisionSpec` names."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        self.patches = nn.Conv2d(
            3, width, spec.patch_size, spec.patch_size, bias=not spec.has_class_token
        )
        self.positions = nn.Parameter(torch.zeros(spec.num_positions, width))
        if spec.has_class_token:
            self.class_token = nn.Parameter(torch.zeros(width))
            self.pre_norm = nn.LayerNorm(width, spec.norm_eps)
        self.blocks = nn.ModuleList(VisionBlock(spec) for _ in range(spec.num_blocks))
        self.norm = nn.Identity() if spec.feature_layers else nn.LayerNorm(width, spec.norm_eps)
        self.is_wide = False  # what the blocks add up is float32, whatever they multiply in

    def forward(self, pixels: Tensor, patch_mask: Tensor | None = None) -> Tensor:
        """Return features `[I, P, C]` of pixels `[I, 3, S, S]`.

        patch_mask, bool `[I, S / patch, S / patch]`, marks the patches of tiles that are partly
        padding; positions then spread over each tile's real part.
        """
        x = self._embed(pixels, patch_mask)
        x = x.float() if self.is_wide else x
        mask = None if patch_mask is None else patch_mask.flatten(1)[:, None, None]
        wanted = self.spec.feature_layers
        outputs = {0: x} if 0 in wanted else {}
        for layer, block in enumerate(self.blocks, start=1):
            x = block(x, mask)
            if layer in wanted:
                outputs[layer] = x
        if not wanted:
            features: Tensor = self.norm(x)
        else:
            features = torch.cat([outputs[layer] for layer in wanted], dim=-1)
        features = features.to(self.positions.dtype)
        return features[:, 1:] if self.spec.drops_first else features

    def _embed(self, pixels: Tensor, patch_mask: Tensor | None) -> Tensor:
        x: Tensor = self.patches(pixels.to(self.positions.dtype)).flatten(2).transpose(1, 2)
        x = x.contiguous()  # in any other order the blocks' products are slower
        if self.spec.has_class_token:
            first = self.class_token.expand(x.shape[0], 1, -1)
            normed: Tensor = self.pre_norm(torch.cat((first, x), dim=1) + self.positions)
            return normed
        if not self.spec.spreads_positions:
            return x + self.positions
        if patch_mask is None:
            side = (
                pixels.shape[-2] // self.spec.patch_size,
                pixels.shape[-1] // self.spec.patch_size,
            )
            patch_mask = pixels.new_ones(pixels.shape[0], *side, dtype=torch.bool)
        return x + self.positions[position_ids(patch_mask, self.spec.patches_per_side)]


def position_ids(patch_mask: Tensor, patches_per_side: int) -> Tensor:
    """Return the row of the position table for each patch, `[I, P]`.

    A tile's real patches, whatever their number, are spread over the `patches_per_side` squared
    grid that was learned (NaViT's fractional coordinates, https://arxiv.org/abs/2307.06304).
    Comparisons happen in float32 with the same operations as in the networks' training code:
    exact arithmetic would put some patches into the neighbouring bucket.
    """
    device = patch_mask.device
    step = 1 / patches_per_side
    boundaries = torch.arange(step, 1.0, step, device=device)

    def buckets(num_real: Tensor, num_all: int) -> Tensor:
        indices = torch.arange(num_all, device=device, dtype=torch.float32)
        places = indices[None, :] * (1.0 / num_real)[:, None]
        found: Tensor = torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)
        return found

    down = buckets(patch_mask[:, :, 0].sum(dim=1), patch_mask.shape[1])
    across = buckets(patch_mask[:, 0, :].sum(dim=1), patch_mask.shape[2])
    ids = down[:, :, None] * patches_per_side + across[:, None, :]
    return torch.where(patch_mask, ids, 0).flatten(1)
