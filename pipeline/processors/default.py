"""Pictures and prompts for the embedded default model.

A picture becomes two square tiles of the tower's input size:

    tile 0   the middle of the picture, up to 4:3 of it squashed square, for the classifier
    tile 1   the whole picture, letterboxed in grey, for the face networks

A user's prompt is the opening words of the caption, which the model goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from pipeline.processors.bpe import BytePairTokenizer
from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from torch import Tensor

TILE_SIZE = 257
NUM_IMAGE_TOKENS = 3
CROP_FRACTION = 0.95  # of the picture: the margin seldom holds what it is of
MOST_SQUASHED = 4 / 3  # the classifier was trained on crops squashed by up to as much
GREY = (127, 127, 127)
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "models" / "default"


class DefaultProcessor:
    """Makes pictures and prompts ready for the default model; holds no state that changes."""

    default_prompt = ""
    max_image_tokens = NUM_IMAGE_TOKENS

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.tokenizer = BytePairTokenizer.from_json(stored)
        self.special_tokens = frozenset(self.tokenizer.specials)
        self.eos_ids = frozenset({self.tokenizer.specials["<eos>"]})
        self.image_token_id = self.tokenizer.specials["<image>"]

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the prompt's ids, image places first, and the two tiles `[2, 3, 257, 257]`."""
        ids = (self.image_token_id,) * NUM_IMAGE_TOKENS + tuple(self.tokenise(prompt.rstrip()))
        return ids, ImageInputs(picture_tiles(image))

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the final prompt as text, for people."""
        return "<image>" * NUM_IMAGE_TOKENS + prompt.rstrip()

    def tokenise(self, text: str) -> list[int]:
        """Split text into ids; special tokens are not read from text."""
        return self.tokenizer.encode(text)

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens and outer spaces left out."""
        return self.tokenizer.decode(ids).strip()


def picture_tiles(image: Image.Image) -> Tensor:
    """Return the middle and the whole of an RGB picture as uint8 `[2, 3, 257, 257]`."""
    tiles = np.stack([np.asarray(_middle(image)), np.asarray(_letterboxed(image))])
    return torch.from_numpy(tiles).permute(0, 3, 1, 2).contiguous()


def _middle(image: Image.Image) -> Image.Image:
    width, height = image.size
    longest = MOST_SQUASHED * min(width, height)
    across = max(CROP_FRACTION * min(width, longest), min(1.0, width))
    down = max(CROP_FRACTION * min(height, longest), min(1.0, height))
    left, top = (width - across) / 2, (height - down) / 2
    box = (left, top, left + across, top + down)
    size = (TILE_SIZE, TILE_SIZE)
    # The gap lets Pillow shrink huge pictures by whole factors first; 3 leaves no visible trace.
    return image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)


def _letterboxed(image: Image.Image) -> Image.Image:
    width, height = image.size
    scale = TILE_SIZE / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    shrunk = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    canvas = Image.new("RGB", (TILE_SIZE, TILE_SIZE), GREY)
    canvas.paste(shrunk, ((TILE_SIZE - size[0]) // 2, (TILE_SIZE - size[1]) // 2))
    return canvas
