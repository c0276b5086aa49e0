"""nanoVLM's pictures and prompts, for its three generations.

prefix        P P ... P  Question: {text} Answer:             P: a place of the image
placeholders  <|image|> x 64  Question: {text} Answer:
tiles         <|im_start|>user⏎ {tiles}{text}<|im_end|>⏎ <|im_start|>assistant⏎
              tiles: <|global_image|> P x n  <row_1_col_1> P x n  <row_1_col_2> P x n ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Resampling

from pipeline.errors import CheckpointError, SampleError
from pipeline.models.config import Config
from pipeline.models.nanovlm import Generation, NanoVLMSpec
from pipeline.processors.chat import IMAGE_MARK, TEXT_MARK, ChatTemplate, PromptFrame
from pipeline.processors.placeholders import check_placeholders, check_system
from pipeline.processors.tokens import FramedText, TextTokenizer
from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How large a picture is made, and how many tiles that is."""

    width: int
    height: int
    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        """Tiles of the picture, the global one included."""
        return 1 if self.rows == self.columns == 1 else 1 + self.rows * self.columns


def tile_grid(width: int, height: int, *, tile: int, max_side: int, fill: bool) -> TileGrid:
    """Return the grid of a picture of `width` x `height` pixels.

    The longer side becomes `max_side` (with `fill`), or the next multiple of `tile` up to that;
    the shorter one the next multiple of its scaled length. That length is computed in double
    precision in exactly this order: for some sizes (840x630 at 2048/512) rounding gives a row
    more than exact arithmetic would, and the networks were trained with it.
    """
    longer, shorter = max(width, height), min(width, height)
    new_longer = max_side if fill else min(max_side, math.ceil(longer / tile) * tile)
    scale = new_longer / longer
    new_shorter = max(math.ceil(shorter * scale / tile) * tile, tile)
    if width >= height:
        return TileGrid(new_longer, new_shorter, new_shorter // tile, new_longer // tile)
    return TileGrid(new_shorter, new_longer, new_longer // tile, new_shorter // tile)


class NanoVLMProcessor:
    """Makes pictures and prompts ready for a nanoVLM; holds no state that changes."""

    default_prompt = "Describe this image."

    def __init__(
        self, config: Config, tokenizer: TextTokenizer, *, system: str | None = None
    ) -> None:
        self._spec = NanoVLMSpec.from_config(config)
        self._tokenizer = tokenizer
        self._tile = self._spec.vision.image_size
        self.special_tokens = tokenizer.special_tokens
        if tokenizer.eos_id is None:
            raise CheckpointError("tokenizer_config.json names no eos_token; captions need an end")
        self.eos_ids = frozenset({tokenizer.eos_id})
        self._max_side = config.integer("max_img_size", self._tile)
        self._fill = config.flag("resize_to_max_side_len", False)
        self._tokens = extra_tokens(config)
        self._image = self._tokens.get("image_token", "<|image|>")
        generation = self._spec.generation
        if generation is not Generation.PREFIX:
            found = tokenizer.wanted_id(self._image)
            if found != self._spec.image_token_id:
                raise CheckpointError(
                    f"the tokenizer gives {self._image} the id {found}; "
                    f"config.json makes it {self._spec.image_token_id}"
                )
        self._frame = self._prompt_frame(config, check_system(system, tokenizer.special_tokens))

    @property
    def max_image_tokens(self) -> int:
        """The most prompt tokens that one picture takes, its separators included."""
        per_tile = self._spec.tokens_per_tile
        if self._spec.generation is not Generation.TILES:
            return per_tile
        side = self._max_side // self._tile
        return (1 + side**2) * (per_tile + 1)

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the prompt's ids and the resized picture, uint8 `[1, 3, H, W]`."""
        grid = self._grid(image)
        # A chat template says its own special tokens; the older layouts are plain texts.
        is_plain = self._spec.generation is not Generation.TILES
        framed = self._framed(grid, prompt)
        ids = self._tokenizer.encode_framed(framed, add_special_tokens=is_plain)
        if self._spec.generation is Generation.PREFIX:
            ids = [self._spec.image_token_id] * self._spec.tokens_per_tile + ids
        num_wanted = grid.num_tiles * self._spec.tokens_per_tile
        check_placeholders(ids, self._spec.image_token_id, num_wanted)
        return tuple(ids), ImageInputs(self._resized(image, grid))

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the final prompt as text, for people."""
        places = ""
        if self._spec.generation is Generation.PREFIX:
            places = "<image>" * self._spec.tokens_per_tile
        return f"{places}{self._framed(self._grid(image), prompt)}"

    def tokenise(self, text: str) -> list[int]:
        """Split text into ids; special tokens are not read from text."""
        return self._tokenizer.encode_plain(text)

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens left out."""
        return self._tokenizer.decode(ids)

    def _grid(self, image: Image.Image) -> TileGrid:
        if self._spec.generation is not Generation.TILES:
            return TileGrid(self._tile, self._tile, 1, 1)
        grid = tile_grid(*image.size, tile=self._tile, max_side=self._max_side, fill=self._fill)
        for row in range(grid.rows if grid.num_tiles > 1 else 0):
            for column in range(grid.columns):
                if f"r{row + 1}c{column + 1}" not in self._tokens:
                    raise SampleError(
                        "too_many_tiles",
                        f"{grid.rows} x {grid.columns} tiles; the checkpoint has no token "
                        f"for row {row + 1}, column {column + 1}",
                    )
        return grid

    def _resized(self, image: Image.Image, grid: TileGrid) -> torch.Tensor:
        is_tiled = self._spec.generation is Generation.TILES
        how = Resampling.BICUBIC if is_tiled else Resampling.BILINEAR
        resized = np.asarray(image.resize((grid.width, grid.height), how))
        return torch.from_numpy(resized.copy()).permute(2, 0, 1)[None].contiguous()

    def _framed(self, grid: TileGrid, prompt: str) -> FramedText:
        return self._frame.fill(prompt, self._image_text(grid))

    def _image_text(self, grid: TileGrid) -> str:
        generation, places = self._spec.generation, self._image * self._spec.tokens_per_tile
        if generation is Generation.PREFIX:
            return ""
        if generation is Generation.PLACEHOLDERS:
            return places
        text = f"{self._tokens['global_image_token']}{places}"
        if grid.num_tiles == 1:
            return text
        for row in range(grid.rows):
            for column in range(grid.columns):
                text += f"{self._tokens[f'r{row + 1}c{column + 1}']}{places}"
        return text

    def _prompt_frame(self, config: Config, system: str | None) -> PromptFrame:
        if self._spec.generation is not Generation.TILES:
            if system is not None:
                raise CheckpointError("this nanoVLM has no chat template; wanted no --system")
            return PromptFrame(f"{IMAGE_MARK}Question: ", " Answer:")
        template = ChatTemplate(config.text("lm_chat_template"), self._tokenizer.named)
        return template.frame(f"{IMAGE_MARK}{TEXT_MARK}", system)


def extra_tokens(config: Config) -> Mapping[str, str]:
    """Return the extra tokens of config.json by their role, in the order of their ids."""
    extra = config.section("vlm_extra_tokens")
    return {role: extra.text(role) for role in extra.values}
