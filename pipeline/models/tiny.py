"""A tiny random network behind the engine's seam, for tests of the engine and of jobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.vlm import VisionLanguageModel, random_weights
from pipeline.records import ImageInputs

TINY_SPEC = DecoderSpec(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    intermediate_size=48,
    vocab_size=61,
    max_positions=512,
)


class TinyModel(VisionLanguageModel):
    """Random weights, large enough that greedy tokens depend on every part of the prompt.

    An image of `[I, 3, H, W]` gives I features: the means and deviations of its channels.
    """

    def __init__(self, spec: DecoderSpec = TINY_SPEC, seed: int = 0) -> None:
        super().__init__(LlamaDecoder(spec), image_token_id=spec.vocab_size)
        self.vision = nn.Linear(6, spec.hidden_size)
        random_weights(self, seed, std=0.4)

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return `[I, C]` for each request."""
        return [self.vision(self._statistics(inputs.pixels)) for inputs in images]

    def _statistics(self, pixels: Tensor) -> Tensor:
        flat = pixels.to(self.vision.weight.dtype).flatten(2) / 255
        return torch.cat((flat.mean(-1), flat.std(-1)), dim=-1)
