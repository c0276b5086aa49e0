"""From vision features to the decoder's width: pixel shuffle and a projection."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.models.linear import Linear
from pipeline.models.matrices import ACTIVATIONS


def pixel_shuffle(features: Tensor, factor: int) -> Tensor:
    """Join each `factor` x `factor` block of patches: `[I, P, C]` to `[I, P / f^2, f^2 C]`.

    Patches stand row by row on a square, and so do the blocks; inside a block the order is row,
    column, channel. nanoVLM and Idefics3 agree on it.
    """
    num_images, num_patches, width = features.shape
    side = int(num_patches**0.5)
    blocks = side // factor
    x = features.view(num_images, blocks, factor, blocks, factor, width)
    x = x.permute(0, 1, 3, 2, 4, 5)
    return x.reshape(num_images, blocks * blocks, factor * factor * width)


class ShuffleProjector(nn.Module):
    """Pixel shuffle, then one matrix without a bias (Idefics3, SmolVLM, nanoVLM)."""

    def __init__(self, vision_size: int, text_size: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.projection = Linear(vision_size * factor**2, text_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Turn `[I, P, C]` into image tokens `[I, P / f^2, text_size]`."""
        tokens: Tensor = self.projection(pixel_shuffle(features, self.factor))
        return tokens


class MLPProjector(nn.Module):
    """Two matrices with an activation between them (LLaVA 1.5, https://arxiv.org/abs/2310.03744)."""

    def __init__(self, vision_size: int, text_size: int, activation: str, has_bias: bool) -> None:
        super().__init__()
        self.up = Linear(vision_size, text_size, bias=has_bias)
        self.down = Linear(text_size, text_size, bias=has_bias)
        self.activation = activation if activation in ACTIVATIONS else "gelu"

    def forward(self, features: Tensor) -> Tensor:
        """Turn `[I, P, C]` into image tokens `[I, P, text_size]`."""
        tokens: Tensor = self.down(self.up.activated(features, self.activation))
        return tokens
