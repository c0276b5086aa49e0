"""Pictures and prompts of LLaVA-type checkpoints: one square picture, one chat.

A picture is padded to a square, resized, or resized and cut in the middle, as the checkpoint's
preprocessor_config.json says and as transformers' image processors compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from PIL.Image import Resampling

from pipeline.errors import CheckpointError
from pipeline.models.config import Config
from pipeline.models.llava import CLIP_MEAN, LlavaSpec
from pipeline.models.stored import read_config, read_image_config, read_optional
from pipeline.processors.chat import ChatTemplate
from pipeline.processors.placeholders import check_placeholders, check_system
from pipeline.processors.texts import chat_template, eos_ids, image_chat_frame
from pipeline.processors.tokens import FramedText, TextTokenizer
from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SquareRules:
    """How a checkpoint makes pictures square; lengths in pixels, sizes are width and height."""

    exact_size: tuple[int, int] | None
    shortest_edge: int | None
    crop: tuple[int, int] | None
    padding: tuple[int, int, int] | None  # the colour that makes a picture square first
    resample: int

    @classmethod
    def from_config(cls, config: Config) -> SquareRules:
        """Read the rules; missing keys have the defaults of the image processor's class."""
        kind = config.text("image_processor_type", "CLIPImageProcessor")
        is_siglip = kind.startswith("Siglip")
        exact, shortest = _size(config, is_square=is_siglip)
        is_resized = config.flag("do_resize", True)
        mean = config.numbers("image_mean", CLIP_MEAN)
        is_padded = kind.startswith("Llava") and config.flag("do_pad", False)
        return cls(
            exact_size=exact if is_resized else None,
            shortest_edge=shortest if is_resized else None,
            crop=_crop(config) if config.flag("do_center_crop", not is_siglip) else None,
            padding=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255))
            if is_padded
            else None,
            resample=config.integer("resample", Resampling.BICUBIC),
        )

    @property
    def final_size(self) -> tuple[int, int] | None:
        """Width and height of every picture; None where they differ from one to the next."""
        return self.crop or self.exact_size

    def apply(self, image: Image.Image) -> Image.Image:
        """Return the picture as the vision tower wants it."""
        if self.padding is not None and image.width != image.height:
            image = _padded(image, self.padding)
        if self.exact_size is not None:
            image = image.resize(self.exact_size, Resampling(self.resample))
        elif self.shortest_edge is not None:
            shorter, longer = sorted(image.size)
            longer = int(self.shortest_edge * longer / shorter)
            is_tall = image.width <= image.height
            size = (self.shortest_edge, longer) if is_tall else (longer, self.shortest_edge)
            image = image.resize(size, Resampling(self.resample))
        return image if self.crop is None else _middle(image, self.crop)


def _size(config: Config, *, is_square: bool) -> tuple[tuple[int, int] | None, int | None]:
    """Read `size`: an exact width and height, or a shortest edge."""
    value = config.values.get("size", 224)
    if isinstance(value, int):
        return ((value, value), None) if is_square else (None, value)
    size = config.section("size")
    if "shortest_edge" in size:
        if "longest_edge" in size:
            raise size.wrong("longest_edge", size.integer("longest_edge"), "shortest_edge alone")
        return None, size.integer("shortest_edge")
    return (size.integer("width"), size.integer("height")), None


def _crop(config: Config) -> tuple[int, int]:
    value = config.values.get("crop_size", 224)
    if isinstance(value, int):
        return value, value
    size = config.section("crop_size")
    return size.integer("width"), size.integer("height")


def _padded(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), colour)
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _middle(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Cut the middle out; where a picture is too small, black stands around it."""
    # Rounded down both when it cuts and when (below zero) it pads, as the library does.
    left, top = ((have - want) // 2 for have, want in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1]))


class LlavaProcessor:
    """Makes pictures and prompts ready for this family; holds no state that changes."""

    default_prompt = "Write a descriptive caption for this image."

    def __init__(self, folder: Path, *, system: str | None = None) -> None:
        config = read_config(folder)
        self._spec = LlavaSpec.from_config(config)
        self._rules = SquareRules.from_config(read_image_config(folder))
        side = self._spec.vision.image_size
        if self._rules.final_size != (side, side):
            raise CheckpointError(
                f"{folder}: pictures become {self._rules.final_size or 'of any size'}; "
                f"the vision tower wants {(side, side)}"
            )
        self._place = read_optional(folder, "processor_config.json").text("image_token", "<image>")
        self._tokenizer = TextTokenizer.load(folder)
        found = self._tokenizer.wanted_id(self._place)
        if found != self._spec.image_token_id:
            raise CheckpointError(
                f"{folder}: the tokenizer gives {self._place} the id {found}; "
                f"config.json makes it {self._spec.image_token_id}"
            )
        self.special_tokens = self._tokenizer.special_tokens
        self.eos_ids = eos_ids(folder, config, self._tokenizer)
        template = ChatTemplate(chat_template(folder, self._tokenizer), self._tokenizer.named)
        system = check_system(system, self.special_tokens)
        self._frame = image_chat_frame(template, self._place, system)
        bos = self._tokenizer.bos_token
        self._adds_special = not (bos and self._frame.before.startswith(bos))

    @property
    def max_image_tokens(self) -> int:
        """The prompt tokens that one picture takes."""
        return self._spec.num_image_tokens

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the prompt's ids and the picture, uint8 `[1, 3, S, S]`."""
        framed = self._framed(prompt)
        ids = self._tokenizer.encode_framed(framed, add_special_tokens=self._adds_special)
        check_placeholders(ids, self._spec.image_token_id, self._spec.num_image_tokens)
        return tuple(ids), ImageInputs(self.pixels(image))

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the final prompt as text, for people."""
        return str(self._framed(prompt))

    def tokenise(self, text: str) -> list[int]:
        """Split text into ids; special tokens are not read from text."""
        return self._tokenizer.encode_plain(text)

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens left out."""
        return self._tokenizer.decode(ids)

    def pixels(self, image: Image.Image) -> Tensor:
        """Make an RGB picture square, uint8 `[1, 3, S, S]`."""
        square = np.array(self._rules.apply(image))
        return torch.from_numpy(square).permute(2, 0, 1)[None].contiguous()

    def _framed(self, prompt: str) -> FramedText:
        return self._frame.fill(prompt, self._place * self._spec.num_image_tokens)
