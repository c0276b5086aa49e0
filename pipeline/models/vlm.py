"""The one seam between the engine and the networks: `CaptionModel`.

A network behind it encodes images to feature vectors, and answers "which token next" for rows
of token ids. Image features take the places of `image_token_id` in the ids, in order, so one
rule serves placeholders, tiles and prefixes alike: a family whose images stand before the text
puts an id of its own there (see `pipeline.processors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.models.attention import KeyValues
from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.records import ImageInputs


class CaptionModel(Protocol):
    """What the engine calls; any network with these can be scheduled, padded and cached."""

    @property
    def spec(self) -> DecoderSpec:
        """The sizes that the KV cache is built from."""
        ...

    @property
    def image_token_id(self) -> int:
        """The id whose places in a prompt are taken by image features."""
        ...

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return, for each request's images, its features `[F, C]` in prompt order."""
        ...

    def next_logits(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        mask: Tensor,
        kv: KeyValues | None,
    ) -> Tensor:
        """Return the logits `[B, V]` that follow the last column of ids `[B, T]`.

        features `[F, C]` are those of all rows in order; positions `[B, T]`; mask bool
        `[B, 1, T, S]`.
        """
        ...


class VisionLanguageModel(nn.Module, ABC):
    """A llama-type decoder with image features spliced into its input; vision is the family's."""

    def __init__(self, decoder: LlamaDecoder, image_token_id: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.image_token_id = image_token_id

    @property
    def spec(self) -> DecoderSpec:
        """The decoder's sizes."""
        return self.decoder.spec

    @abstractmethod
    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return each request's features `[F, C]`."""

    def splice(self, ids: Tensor, features: Tensor | None) -> Tensor:
        """Embed ids `[B, T]`, image features in the places of the image token: `[B, T, C]`."""
        if features is None:
            return self.decoder.embed(ids)
        is_image = ids == self.image_token_id
        # The image token may lie beyond the embedding table: no row of it is ever used.
        embedded = self.decoder.embed(ids.masked_fill(is_image, 0))
        return embedded.masked_scatter(is_image[:, :, None], features.to(embedded.dtype))

    def next_logits(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        mask: Tensor,
        kv: KeyValues | None,
    ) -> Tensor:
        """Return the logits `[B, V]` of the last column only: the others are never sampled."""
        hidden = self.decoder(self.splice(ids, features), positions, mask, kv)
        return self.decoder.logits(hidden[:, -1])


def random_weights(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Fill a network with seeded normal weights, norms left at one: for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                drawn = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(drawn)
