"""LLaVA with a llama decoder (https://arxiv.org/abs/2310.03744): LLaVA 1.5, JoyCaption.

A SigLIP or CLIP tower read before its last block, a projector of two matrices, one picture in
the places of one image token each.
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
from pipeline.models.projector import MLPProjector
from pipeline.models.stored import read_config, read_image_config
from pipeline.models.towers import activation_name, tower_sources
from pipeline.models.vision import VisionSpec, VisionTransformer
from pipeline.models.vlm import VisionLanguageModel
from pipeline.models.weights import Layout, Source, load_weights, unfilled
from pipeline.records import ImageInputs

# Mean and spread of the pictures that CLIP was trained on.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Until version 4.52 transformers stored the parts under these names; some releases still do.
_RENAMES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


@dataclass(frozen=True, slots=True)
class LlavaSpec:
    """The sizes of a network of this family."""

    vision: VisionSpec
    decoder: DecoderSpec
    image_token_id: int
    projector_activation: str
    has_projector_bias: bool

    @property
    def num_image_tokens(self) -> int:
        """Image tokens that a picture becomes."""
        return self.vision.num_positions - int(self.vision.drops_first)

    @classmethod
    def from_config(cls, config: Config) -> LlavaSpec:
        """Read config.json; missing keys have the defaults of transformers' LlavaConfig."""
        text = config.section("text_config")
        is_tied = config.flag("tie_word_embeddings", False) or text.flag(
            "tie_word_embeddings", False
        )
        image_token = config.integer("image_token_index", config.integer("image_token_id", 32_000))
        return cls(
            vision=_vision_spec(config),
            decoder=decoder_spec(text, is_head_tied=is_tied),
            image_token_id=image_token,
            projector_activation=activation_name(config, "projector_hidden_act", "gelu"),
            has_projector_bias=config.flag("multimodal_projector_bias", True),
        )


def _vision_spec(config: Config) -> VisionSpec:
    vision = config.section("vision_config")
    kind = vision.text("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise vision.wrong("model_type", kind, "clip_vision_model or siglip_vision_model")
    is_clip = kind == "clip_vision_model"
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.wrong("vision_feature_select_strategy", strategy, "default or full")
    num_layers = vision.integer("num_hidden_layers", 12)
    return VisionSpec(
        hidden_size=vision.integer("hidden_size", 768),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=num_layers,
        num_heads=vision.integer("num_attention_heads", 12),
        image_size=vision.integer("image_size", 224),
        patch_size=vision.integer("patch_size", 32 if is_clip else 16),
        norm_eps=vision.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        activation=activation_name(
            vision, "hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh"
        ),
        has_class_token=is_clip,
        drops_first=strategy == "default",
        feature_layers=_feature_layers(config, num_layers),
    )


def _feature_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Read which outputs are features, one or several; negative ones count from the last."""
    value = config.values.get("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    counted: list[int] = []
    for layer in layers:
        if not isinstance(layer, int) or not -num_layers - 1 <= layer <= num_layers:
            raise config.wrong("vision_feature_layer", value, f"layers from 0 to {num_layers}")
        counted.append(layer if layer >= 0 else num_layers + 1 + layer)
    return tuple(counted)


class Llava(VisionLanguageModel):
    """Vision transformer, two matrices, llama decoder."""

    def __init__(self, spec: LlavaSpec, scale: PixelScale) -> None:
        super().__init__(LlamaDecoder(spec.decoder), spec.image_token_id)
        self.vision = VisionTransformer(spec.vision)
        self.projector = MLPProjector(
            spec.vision.feature_size,
            spec.decoder.hidden_size,
            spec.projector_activation,
            spec.has_projector_bias,
        )
        self._scale = scale

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return each picture's image tokens `[F, C]`; pixels are uint8 or scaled."""
        device = self.vision.positions.device
        tiles = [self._scale(image.pixels.to(device)) for image in images]
        return encode_tiles(self.vision, self.projector, tiles)


def weight_layout(spec: LlavaSpec) -> Layout:
    """Say which stored tensor becomes which parameter; names are transformers'."""
    tower, projector = "model.vision_tower", "model.multi_modal_projector"
    leaves = ("weight", "bias") if spec.has_projector_bias else ("weight",)
    sources = {
        **tower_sources(spec.vision, tower),
        **decoder_sources(spec.decoder, "model.language_model"),
    }
    for leaf in leaves:
        sources[f"projector.up.{leaf}"] = (Source((f"{projector}.linear_1.{leaf}",)),)
        sources[f"projector.down.{leaf}"] = (Source((f"{projector}.linear_2.{leaf}",)),)
    unused = range(spec.vision.num_blocks, spec.vision.num_layers)
    ignored = [
        r".*\.rotary_emb\.inv_freq",
        r".*\.position_ids",
        r"model\.vision_tower\.(head|post_layernorm)\..*",
        *(rf"model\.vision_tower\.encoder\.layers\.{layer}\..*" for layer in unused),
    ]
    return Layout(sources, _RENAMES, tuple(ignored))


def blank_llava(folder: Path) -> tuple[Llava, Layout]:
    """Build the network that a folder's config describes, unfilled, and say what fills it."""
    spec = LlavaSpec.from_config(read_config(folder))
    scale = llava_scale(read_image_config(folder))
    with unfilled():
        model = Llava(spec, scale)
    return model.eval(), weight_layout(spec)


def load_llava(folder: Path, dtype: torch.dtype, device: torch.device) -> Llava:
    """Load a checkpoint's folder in evaluation mode."""
    model, layout = blank_llava(folder)
    load_weights(model, layout, folder, dtype, device)
    return model


def llava_scale(config: Config) -> PixelScale:
    """Return how a checkpoint's pixels are scaled; each image processor class has its defaults."""
    if config.text("image_processor_type", "").startswith("Siglip"):
        return PixelScale.from_config(config, mean=(0.5,) * 3, std=(0.5,) * 3)
    return PixelScale.from_config(config, mean=CLIP_MEAN, std=CLIP_STD)
