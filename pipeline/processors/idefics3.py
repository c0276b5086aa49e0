"""Pictures and prompts of Idefics3, SmolVLM and SmolVLM2.

    split      F <row_1_col_1> P x n  F <row_1_col_2> P x n ⏎ ... ⏎⏎ F <global-img> P x n  F
    not split  F <global-img> P x n  F             F: <fake_token_around_image>, P: <image>

The picture is first made to fit, then stretched to whole tiles; the global tile is that stretched
picture in one tile. All sizes are computed as transformers' image processors compute them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Resampling

from pipeline.errors import CheckpointError
from pipeline.models.config import Config
from pipeline.models.idefics3 import Idefics3Spec
from pipeline.models.stored import read_config, read_image_config, read_optional
from pipeline.processors.chat import ChatTemplate
from pipeline.processors.placeholders import check_placeholders, check_system
from pipeline.processors.texts import chat_template, eos_ids, image_chat_frame
from pipeline.processors.tokens import FramedText, TextTokenizer
from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from PIL import Image

LARGEST_SIDE = 4096  # pixels; transformers' own limit, whatever a checkpoint asks for
FAKE, PLACE, END = "<fake_token_around_image>", "<image>", "<end_of_utterance>"
GLOBAL = "<global-img>"


@dataclass(frozen=True, slots=True)
class TileRules:
    """How a checkpoint's preprocessor_config.json cuts pictures; lengths in pixels."""

    tile: int
    longest_edge: int | None  # None: no such rule
    exact_size: tuple[int, int] | None  # width, height; used where there is no longest edge
    resample: int
    is_resized: bool
    is_split: bool

    @classmethod
    def from_config(cls, config: Config) -> TileRules:
        """Read the rules; missing keys have the defaults of transformers' classes."""
        size = config.section("size")
        longest = size.integer("longest_edge", 4 * 364) if "height" not in size else None
        if "longest_edge" in size:
            longest = size.integer("longest_edge")
        exact = None if longest else (size.integer("width"), size.integer("height"))
        return cls(
            tile=config.section("max_image_size").integer("longest_edge", 364),
            longest_edge=longest,
            exact_size=exact,
            resample=config.integer("resample", Resampling.LANCZOS),
            is_resized=config.flag("do_resize", True),
            is_split=config.flag("do_image_splitting", True),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after the first resizing."""
        if not self.is_resized:
            return width, height
        if self.longest_edge is None:
            assert self.exact_size is not None
            return self.exact_size
        ratio, longest = width / height, self.longest_edge
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            width, height = int(longest * ratio), longest
            width += width % 2
        return _below_limit(max(width, 1), max(height, 1))

    def stretched(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height in whole tiles; a picture that is not split is one tile."""
        if not self.is_split:
            return self.tile, self.tile
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return width, height

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns for a picture's size; 0, 0 where it is one tile alone."""
        width, height = self.stretched(*self.fitted(width, height))
        rows, columns = height // self.tile, width // self.tile
        return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)

    @property
    def max_side(self) -> int:
        """The most tiles along the longer side, for a picture of any size."""
        if not self.is_split:
            return 1
        if self.longest_edge is not None and self.is_resized:
            return math.ceil(min(self.longest_edge, LARGEST_SIDE) / self.tile)
        largest = max(self.exact_size) if self.exact_size and self.is_resized else LARGEST_SIDE
        return math.ceil(largest / self.tile)


def _below_limit(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > LARGEST_SIDE:
        width, height = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
    elif height > width and height > LARGEST_SIDE:
        width, height = int(LARGEST_SIDE * ratio), LARGEST_SIDE
    return max(width, 1), max(height, 1)


class Idefics3Processor:
    """Makes pictures and prompts ready for this family; holds no state that changes."""

    default_prompt = "Describe this image."

    def __init__(self, folder: Path, *, system: str | None = None) -> None:
        config = read_config(folder)
        self._rules = TileRules.from_config(read_image_config(folder))
        self._tokenizer = TextTokenizer.load(folder, extra=(FAKE, PLACE, END))
        self._image_token_id = Idefics3Spec.from_config(config).image_token_id
        self.tokens_per_tile = _tokens_per_tile(folder, config, self._rules.tile)
        self.special_tokens = self._tokenizer.special_tokens
        if self._tokenizer.wanted_id(PLACE) != self._image_token_id:
            raise CheckpointError(
                f"{folder}: the tokenizer gives {PLACE} the id {self._tokenizer.id_of(PLACE)}; "
                f"config.json makes it {self._image_token_id}"
            )
        # Whatever generation_config.json says, nothing after the end of a turn is a caption.
        self.eos_ids = eos_ids(folder, config, self._tokenizer) | {self._tokenizer.wanted_id(END)}
        template = ChatTemplate(chat_template(folder, self._tokenizer), self._tokenizer.named)
        system = check_system(system, self.special_tokens)
        self._frame = image_chat_frame(template, PLACE, system)
        bos = self._tokenizer.bos_token
        self._adds_special = not (bos and self._frame.before.startswith(bos))

    @property
    def max_image_tokens(self) -> int:
        """The most prompt tokens that one picture takes, its separators included."""
        side = self._rules.max_side
        text = self._image_text(side, side) if side > 1 else self._image_text(0, 0)
        return len(self._tokenizer.encode(text))

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the prompt's ids and the tiles, uint8 `[I, 3, S, S]`, in prompt order."""
        framed = self._framed(image, prompt)
        ids = self._tokenizer.encode_framed(framed, add_special_tokens=self._adds_special)
        tiles = self.tiles(image)
        check_placeholders(ids, self._image_token_id, len(tiles) * self.tokens_per_tile)
        return tuple(ids), ImageInputs(tiles)

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the final prompt as text, for people."""
        return str(self._framed(image, prompt))

    def tokenise(self, text: str) -> list[int]:
        """Split text into ids; special tokens are not read from text."""
        return self._tokenizer.encode_plain(text)

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens left out."""
        return self._tokenizer.decode(ids)

    def grid(self, image: Image.Image) -> tuple[int, int]:
        """Return rows and columns of a picture's tiles; 0, 0 where it is one tile alone."""
        return self._rules.grid(*image.size)

    def tiles(self, image: Image.Image) -> torch.Tensor:
        """Cut an RGB picture into uint8 tiles `[I, 3, S, S]`, row by row, the whole one last."""
        rules, how = self._rules, Resampling(self._rules.resample)
        fitted = image
        if rules.is_resized:
            fitted = image.resize(rules.fitted(*image.size), how)
        size = rules.stretched(*fitted.size)
        stretched = fitted.resize(size, how)
        columns, rows = size[0] // rules.tile, size[1] // rules.tile
        if rows <= 1 and columns <= 1:
            return _tensor(stretched)[None]
        whole = _tensor(stretched.resize((rules.tile, rules.tile), how))
        grid = _tensor(stretched).view(3, rows, rules.tile, columns, rules.tile)
        tiles = grid.permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, rules.tile, rules.tile)
        return torch.cat((tiles, whole[None]))

    def _framed(self, image: Image.Image, prompt: str) -> FramedText:
        return self._frame.fill(prompt, self._image_text(*self.grid(image)))

    def _image_text(self, rows: int, columns: int) -> str:
        places = PLACE * self.tokens_per_tile
        whole = f"{FAKE}{GLOBAL}{places}{FAKE}"
        if rows == columns == 0:
            return whole
        lines = (
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{places}" for column in range(columns))
            for row in range(rows)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


def _tokens_per_tile(folder: Path, config: Config, tile: int) -> int:
    """Return the image tokens of a tile; CheckpointError where text and network disagree."""
    made = Idefics3Spec.from_config(config).tokens_per_tile(tile)
    written = read_optional(folder, "processor_config.json").integer("image_seq_len", 169)
    if made != written:
        raise CheckpointError(
            f"{folder}: processor_config.json writes image_seq_len {written} places for a tile; "
            f"a tile of {tile} pixels makes {made} image tokens"
        )
    return made


def _tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
