"""Idefics3, SmolVLM and SmolVLM2 (https://arxiv.org/abs/2408.12637, https://arxiv.org/abs/2504.05299).

A SigLIP tower whose positions spread over partial tiles, pixel shuffle, one matrix, and a llama
decoder. Images are tiles in prompt order, the global one last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.models.config import Config
from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.llama import decoder_sources, decoder_spec
from pipeline.models.pixels import PixelScale, encode_tiles
from pipeline.models.projector import ShuffleProjector
from pipeline.models.stored import read_config, read_image_config
from pipeline.models.towers import activation_name, tower_sources
from pipeline.models.vision import VisionSpec, VisionTransformer
from pipeline.models.vlm import VisionLanguageModel
from pipeline.models.weights import Layout, Source, load_weights, unfilled
from pipeline.records import ImageInputs


@dataclass(frozen=True, slots=True)
class Idefics3Spec:
    """The sizes of a network of this family."""

    vision: VisionSpec
    decoder: DecoderSpec
    shuffle_factor: int
    image_token_id: int

    @classmethod
    def from_config(cls, config: Config) -> Idefics3Spec:
        """Read config.json; missing keys have the defaults of transformers' config classes."""
        text = config.section("text_config")
        is_tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
        return cls(
            vision=_vision_spec(config.section("vision_config")),
            decoder=decoder_spec(text, is_head_tied=is_tied),
            shuffle_factor=config.integer("scale_factor", 2),
            image_token_id=config.integer("image_token_id", 128_257),
        )

    def tokens_per_tile(self, tile: int) -> int:
        """Image tokens that a square tile of `tile` pixels becomes."""
        return (tile // self.vision.patch_size // self.shuffle_factor) ** 2


def _vision_spec(config: Config) -> VisionSpec:
    return VisionSpec(
        hidden_size=config.integer("hidden_size", 1152),
        intermediate_size=config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 12),
        num_heads=config.integer("num_attention_heads", 16),
        image_size=config.integer("image_size", 224),
        patch_size=config.integer("patch_size", 32),
        norm_eps=config.number("layer_norm_eps", 1e-6),
        activation=activation_name(config, "hidden_act", "gelu_pytorch_tanh"),
        spreads_positions=True,
    )


class Idefics3(VisionLanguageModel):
    """Vision transformer, pixel shuffle, llama decoder."""

    def __init__(self, spec: Idefics3Spec, scale: PixelScale) -> None:
        super().__init__(LlamaDecoder(spec.decoder), spec.image_token_id)
        self.vision = VisionTransformer(spec.vision)
        self.projector = ShuffleProjector(
            spec.vision.hidden_size, spec.decoder.hidden_size, spec.shuffle_factor
        )
        self._scale = scale

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return each request's image tokens `[F, C]`; pixels are tiles, uint8 or scaled."""
        device = self.vision.positions.device
        tiles = [self._scale(image.pixels.to(device)) for image in images]
        masks = [image.patch_mask for image in images]
        return encode_tiles(self.vision, self.projector, tiles, masks)


def weight_layout(spec: Idefics3Spec) -> Layout:
    """Say which stored tensor becomes which parameter; names are transformers'."""
    projection = Source(("model.connector.modality_projection.proj.weight",))
    return Layout(
        {
            **tower_sources(spec.vision, "model.vision_model"),
            "projector.projection.weight": (projection,),
            **decoder_sources(spec.decoder, "model.text_model"),
        },
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.position_ids"),
    )


def blank_idefics3(folder: Path) -> tuple[Idefics3, Layout]:
    """Build the network that a folder's config describes, unfilled, and say what fills it."""
    spec = Idefics3Spec.from_config(read_config(folder))
    scale = PixelScale.from_config(read_image_config(folder), mean=(0.5,) * 3, std=(0.5,) * 3)
    with unfilled():
        model = Idefics3(spec, scale)
    return model.eval(), weight_layout(spec)


def load_idefics3(folder: Path, dtype: torch.dtype, device: torch.device) -> Idefics3:
    """Load a checkpoint's folder in evaluation mode."""
    model, layout = blank_idefics3(folder)
    load_weights(model, layout, folder, dtype, device)
    return model
