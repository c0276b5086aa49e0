"""Eight photographs that stand for all others when a network's 8-bit steps are chosen."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from pipeline.processors.processor import Processor
from pipeline.records import ImageInputs

FOLDER = Path(__file__).resolve().parent / "calibration_pictures"
MAX_TILES = 2  # of each picture: the first and the last, one a part and the other the whole


def pictures() -> list[Image.Image]:
    """Open the photographs, in the order of their names."""
    opened = []
    for path in sorted(FOLDER.glob("*.jpg")):
        with Image.open(path) as image:
            opened.append(image.convert("RGB"))
    return opened


def calibration_inputs(processor: Processor, side: int) -> list[ImageInputs]:
    """Make the photographs ready for a tower of `side` pixels, a few tiles of each."""
    return [
        few_tiles(processor.prepare(picture, processor.default_prompt)[1], side)
        for picture in pictures()
    ]


def few_tiles(inputs: ImageInputs, side: int) -> ImageInputs:
    """Leave out most tiles `[I, 3, H, W]`; a picture to be cut up yet becomes one tile."""
    pixels, mask = inputs.pixels, inputs.patch_mask
    if len(pixels) > MAX_TILES:
        kept = [0, len(pixels) - 1]
        return ImageInputs(pixels[kept], None if mask is None else mask[kept])
    if max(pixels.shape[-2:]) > side:
        whole = F.interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True)
        pixels = whole if pixels.is_floating_point() else whole.round_().to(torch.uint8)
    return ImageInputs(pixels, mask)
