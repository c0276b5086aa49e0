"""What every checkpoint family says of its pictures and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pipeline.records import ImageInputs

if TYPE_CHECKING:
    from PIL import Image


class Processor(Protocol):
    """Makes pictures and prompts ready for one network, and reads its tokens; thread-safe."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a caption."""
        ...

    @property
    def default_prompt(self) -> str:
        """The prompt used where the user gives none."""
        ...

    @property
    def max_image_tokens(self) -> int:
        """The most prompt tokens that one picture takes, its separators included."""
        ...

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Return the prompt's ids, image places included, and the pixels of an RGB image.

        Raises SampleError where this picture or prompt cannot be used.
        """
        ...

    def render(self, image: Image.Image, prompt: str) -> str:
        """Return the final prompt as text, for people."""
        ...

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens left out."""
        ...
