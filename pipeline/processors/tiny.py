"""A processor for the tiny random network: letters are tokens, an image is one 4x4 tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from PIL import Image

LETTERS = "\0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-:"
NUM_LETTERS = 61


class TinyProcessor:
    """61 letters; the first one ends a caption."""

    eos_ids = frozenset({0})
    default_prompt = "describe"
    max_image_tokens = 1

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the image's place, then the prompt's letters; unknown letters are left out."""
        small = np.asarray(image.resize((4, 4)), dtype=np.uint8)
        pixels = torch.from_numpy(small.copy()).permute(2, 0, 1)[None]
        letters = tuple(LETTERS.index(c) for c in prompt if c in LETTERS[1:NUM_LETTERS])
        return (NUM_LETTERS, *letters), ImageInputs(pixels)

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the prompt with the image's place shown."""
        return f"<image>{prompt}"

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the letters of ids."""
        return "".join(LETTERS[i] for i in ids if i)
