"""From 8-bit pixels to what a vision tower wants, exactly as the families' own code computes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from pipeline.models.config import Config
from pipeline.models.vision import VisionTransformer

# Bounds the memory of a tower's activations. Those of a usual tower (12 MiB in bfloat16) so are
# below what `pipeline.freed_memory` has mapped anew each time, which costs a quarter of the speed.
PATCHES_AT_ONCE = 2048
GPU_PATCHES_AT_ONCE = 16_384  # a GPU's units want more rows, and its kernels cost a call each


class PixelScale:
    """A float32 for each of the 256 values in each channel, so that rounding is the family's own.

    A pixel has only 256 values, and a table of what they become is exact whatever the order of
    operations that a family rounds in (scaled in float64, shifted in float32, or divided).
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table  # [3, 256]

    @classmethod
    def zero_to_one(cls) -> PixelScale:
        """Divide by 255 in float32."""
        return cls((torch.arange(256, dtype=torch.float32, device="cpu") / 255).expand(3, 256))

    @classmethod
    def standardised(
        cls, factor: float | None, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> PixelScale:
        """Multiply by `factor` in float64, round to float32, then subtract and divide.

        That is what transformers' image processors do; None leaves a step out.
        """
        # "cpu" is named, since networks are built inside `unfilled()`.
        table = torch.arange(256, dtype=torch.float64, device="cpu").expand(3, 256)
        if factor is not None:
            table = table * factor
        table = table.to(torch.float32)
        if mean is not None and std is not None:
            shift, spread = (
                torch.tensor(values, dtype=torch.float32, device="cpu")[:, None]
                for values in (mean, std)
            )
            table = (table - shift) / spread
        return cls(table)

    @classmethod
    def from_config(
        cls, config: Config, *, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> PixelScale:
        """Read the rules of transformers' image processors; `mean`, `std` are a class's own."""
        is_rescaled = config.flag("do_rescale", True)
        is_standardised = config.flag("do_normalize", True)
        return cls.standardised(
            config.number("rescale_factor", 1 / 255) if is_rescaled else None,
            config.numbers("image_mean", mean) if is_standardised else None,
            config.numbers("image_std", std) if is_standardised else None,
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Scale uint8 `[I, 3, H, W]` to float32 of the same shape; floats pass as they are."""
        if pixels.is_floating_point():
            return pixels
        if self._table.device != pixels.device:
            self._table = self._table.to(pixels.device)
        channels = [self._table[c][pixels[:, c].int()] for c in range(3)]
        return torch.stack(channels, dim=1)


def encode_tiles(
    vision: VisionTransformer,
    projector: nn.Module,
    tiles: Sequence[Tensor],
    masks: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Run each request's tiles `[I, 3, S, S]` through tower and projector: `[F, C]` each.

    Tiles of all requests share batches of `PATCHES_AT_ONCE`; masks are bool `[I, h, w]` or None.
    """
    pixels = torch.cat(list(tiles))
    mask = None
    if any(each is not None for each in masks):
        side = (
            pixels.shape[2] // vision.spec.patch_size,
            pixels.shape[3] // vision.spec.patch_size,
        )
        mask = torch.cat(
            [
                torch.ones(len(tile), *side, dtype=torch.bool, device=pixels.device)
                if each is None
                else each.to(pixels.device)
                for tile, each in zip(tiles, masks, strict=True)
            ]
        )
    encoded = []
    most = PATCHES_AT_ONCE if pixels.device.type == "cpu" else GPU_PATCHES_AT_ONCE
    at_once = max(1, most // (pixels.shape[-1] // vision.spec.patch_size) ** 2)
    for start in range(0, len(pixels), at_once):
        some = slice(start, start + at_once)
        encoded.append(projector(vision(pixels[some], None if mask is None else mask[some])))
    tokens = torch.cat(encoded)
    ends = list(accumulate(len(tile) for tile in tiles))
    starts = [0, *ends[:-1]]
    return [tokens[a:b].flatten(0, 1) for a, b in zip(starts, ends, strict=True)]
