"""nanoVLM's three generations (https://github.com/huggingface/nanoVLM, Apache-2.0).

    prefix        222M          one picture before the text, 49 image tokens
    placeholders  450M          one picture in the places of 64 `<|image|>`
    tiles         230M / 460M   a global tile and a grid, each with its own placeholders

The network is the same in all; they differ in pictures and prompts, and are told apart by the
keys that their config has, since each generation's code fills in other defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models.attention import RopeScaling
from pipeline.models.config import Config
from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.pixels import PixelScale, encode_tiles
from pipeline.models.projector import ShuffleProjector
from pipeline.models.stored import read_config
from pipeline.models.vision import VisionSpec, VisionTransformer
from pipeline.models.vlm import VisionLanguageModel
from pipeline.models.weights import Layout, Source, load_weights, unfilled
from pipeline.records import ImageInputs


class Generation(Enum):
    """Which of nanoVLM's layouts a checkpoint has."""

    PREFIX = "prefix"
    PLACEHOLDERS = "placeholders"
    TILES = "tiles"

    @classmethod
    def of(cls, config: Config) -> Generation:
        """Tell by the keys of config.json."""
        extra = config.section("vlm_extra_tokens")
        if "lm_chat_template" in config or "global_image_token" in extra:
            return cls.TILES
        return cls.PLACEHOLDERS if "vlm_extra_tokens" in config else cls.PREFIX


@dataclass(frozen=True, slots=True)
class NanoVLMSpec:
    """The sizes of a nanoVLM network."""

    generation: Generation
    vision: VisionSpec
    decoder: DecoderSpec
    shuffle_factor: int
    image_token_id: int

    @property
    def tokens_per_tile(self) -> int:
        """Image tokens that one tile becomes."""
        return (self.vision.patches_per_side // self.shuffle_factor) ** 2

    @classmethod
    def from_config(cls, config: Config) -> NanoVLMSpec:
        """Read config.json; CheckpointError where it asks for what no published one has."""
        if config.flag("vit_cls_flag", False):
            raise config.wrong("vit_cls_flag", True, "false: features are patches here")
        if config.number("lm_attn_scaling", 1.0) != 1.0:
            raise config.wrong("lm_attn_scaling", config.number("lm_attn_scaling"), "1.0")
        generation = Generation.of(config)
        vocab_size = config.integer("lm_vocab_size")
        # Extra tokens get consecutive ids behind the base vocabulary. A prefix has none, so its
        # places get the id behind the whole table: no text can ever hold it.
        extra = list(config.section("vlm_extra_tokens").values)
        place = extra.index("image_token") if "image_token" in extra else 0
        image_token_id = config.integer("lm_base_vocab_size", vocab_size) + place
        spec = cls(
            generation,
            _vision_spec(config),
            _decoder_spec(config, vocab_size),
            config.integer("mp_pixel_shuffle_factor"),
            image_token_id if generation is not Generation.PREFIX else vocab_size,
        )
        wanted = config.integer("mp_image_token_length", spec.tokens_per_tile)
        if wanted != spec.tokens_per_tile:
            found = f"{spec.tokens_per_tile}, as sizes and shuffle factor make it"
            raise config.wrong("mp_image_token_length", wanted, found)
        return spec


def _vision_spec(config: Config) -> VisionSpec:
    return VisionSpec(
        hidden_size=config.integer("vit_hidden_dim"),
        intermediate_size=config.integer("vit_inter_dim"),
        num_layers=config.integer("vit_n_blocks"),
        num_heads=config.integer("vit_n_heads"),
        image_size=config.integer("vit_img_size"),
        patch_size=config.integer("vit_patch_size"),
        norm_eps=config.number("vit_ln_eps", 1e-6),
    )


def _decoder_spec(config: Config, vocab_size: int) -> DecoderSpec:
    width, num_heads = config.integer("lm_hidden_dim"), config.integer("lm_n_heads")
    max_positions = config.integer("lm_max_position_embeddings")
    return DecoderSpec(
        num_layers=config.integer("lm_n_blocks"),
        num_heads=num_heads,
        num_kv_heads=config.integer("lm_n_kv_heads"),
        head_dim=width // num_heads,
        hidden_size=width,
        intermediate_size=config.integer("lm_inter_dim"),
        vocab_size=vocab_size,
        rope_theta=config.number("lm_re_base"),
        norm_eps=config.number("lm_rms_eps", 1e-5),
        max_positions=max_positions,
        is_head_tied=config.flag("lm_tie_weights", True),
        rope_scaling=RopeScaling("overflow", original_max_positions=max_positions),
    )


class NanoVLM(VisionLanguageModel):
    """Vision transformer, pixel shuffle, llama-type decoder."""

    def __init__(self, spec: NanoVLMSpec) -> None:
        super().__init__(LlamaDecoder(spec.decoder), spec.image_token_id)
        self.generation = spec.generation
        self.vision = VisionTransformer(spec.vision)
        self.projector = ShuffleProjector(
            spec.vision.hidden_size, spec.decoder.hidden_size, spec.shuffle_factor
        )
        self._scale = PixelScale.zero_to_one()

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return each picture's image tokens `[F, C]`.

        Pixels are either the whole resized picture, uint8 `[1, 3, H, W]`, or float tiles
        `[I, 3, S, S]` that are cut and scaled already.
        """
        tiles = [self.tiles(image.pixels) for image in images]
        return encode_tiles(self.vision, self.projector, tiles)

    def tiles(self, pixels: Tensor) -> Tensor:
        """Cut a resized picture into float tiles `[I, 3, S, S]`, in prompt order."""
        pixels = pixels.to(self.vision.positions.device)
        if pixels.is_floating_point():
            return pixels
        scaled = self._scale(pixels)
        if self.generation is not Generation.TILES:
            return scaled
        return cut_tiles(scaled, self.vision.spec.image_size)


def cut_tiles(picture: Tensor, size: int) -> Tensor:
    """Cut `[1, 3, H, W]` into tiles `[I, 3, size, size]`: the global one, then row by row.

    The global tile is the whole picture squashed to a square, bilinear with antialiasing. A
    picture of one tile is that tile alone.
    """
    rows, columns = picture.shape[2] // size, picture.shape[3] // size
    if rows == columns == 1:
        return picture
    grid = picture.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4)
    whole = F.interpolate(
        picture, size=(size, size), mode="bilinear", align_corners=False, antialias=True
    )
    return torch.cat((whole, grid.reshape(rows * columns, 3, size, size)))


def weight_layout(spec: NanoVLMSpec) -> Layout:
    """Say which stored tensor becomes which parameter; names are upstream's."""
    sources = {
        "vision.patches.weight": "vision_encoder.patch_embedding.conv.weight",
        "vision.patches.bias": "vision_encoder.patch_embedding.conv.bias",
        "vision.positions": "vision_encoder.patch_embedding.position_embedding",
        "vision.norm.weight": "vision_encoder.layer_norm.weight",
        "vision.norm.bias": "vision_encoder.layer_norm.bias",
        "projector.projection.weight": "MP.proj.weight",
        "decoder.norm.weight": "decoder.norm.weight",
    }
    for layer in range(spec.vision.num_layers):
        for ours, theirs in _VISION_NAMES:
            for leaf in ("weight", "bias"):
                sources[f"vision.blocks.{layer}.{ours}.{leaf}"] = (
                    f"vision_encoder.blocks.{layer}.{theirs}.{leaf}"
                )
    layout: dict[str, tuple[Source, ...]] = {
        ours: (Source((theirs,)),) for ours, theirs in sources.items()
    }
    tied = ("decoder.head.weight", "decoder.token_embedding.weight")
    layout["decoder.embedding.weight"] = (Source(tied if spec.decoder.is_head_tied else tied[1:]),)
    if not spec.decoder.is_head_tied:
        layout["decoder.head.weight"] = (Source(tied[:1]),)
    for layer in range(spec.decoder.num_layers):
        layout |= _decoder_block(spec.decoder, layer)
    return Layout(layout, ignored=(r"decoder\.rotary_embd\.inv_freq",))


_VISION_NAMES = (
    ("attention_norm", "ln1"),
    ("qkv", "attn.qkv_proj"),
    ("out", "attn.out_proj"),
    ("mlp_norm", "ln2"),
    ("up", "mlp.fc1"),
    ("down", "mlp.fc2"),
)


def _decoder_block(spec: DecoderSpec, layer: int) -> dict[str, tuple[Source, ...]]:
    ours, theirs = f"decoder.blocks.{layer}", f"decoder.blocks.{layer}"
    kv_rows = spec.num_kv_heads * spec.head_dim

    def sources(*parts: tuple[str, int]) -> tuple[Source, ...]:
        return tuple(Source((f"{theirs}.{name}.weight",), rows) for name, rows in parts)

    return {
        f"{ours}.attention_norm.weight": sources(("norm1", 0)),
        f"{ours}.qkv.weight": sources(
            ("attn.q_proj", spec.num_heads * spec.head_dim),
            ("attn.k_proj", kv_rows),
            ("attn.v_proj", kv_rows),
        ),
        f"{ours}.out.weight": sources(("attn.out_proj", 0)),
        f"{ours}.mlp_norm.weight": sources(("norm2", 0)),
        f"{ours}.gate_up.weight": sources(
            ("mlp.gate_proj", spec.intermediate_size), ("mlp.up_proj", spec.intermediate_size)
        ),
        f"{ours}.down.weight": sources(("mlp.down_proj", 0)),
    }


def blank_nanovlm(folder: Path) -> tuple[NanoVLM, Layout]:
    """Build the network that a folder's config describes, unfilled, and say what fills it."""
    spec = NanoVLMSpec.from_config(read_config(folder))
    with unfilled():
        model = NanoVLM(spec)
    return model.eval(), weight_layout(spec)


def load_nanovlm(folder: Path, dtype: torch.dtype, device: torch.device) -> NanoVLM:
    """Load a checkpoint's folder in evaluation mode."""
    model, layout = blank_nanovlm(folder)
    load_weights(model, layout, folder, dtype, device)
    return model


def filter_as_upstream(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set what nanoVLM's own sampling leaves out to -inf, `[B, V]`.

    It differs from the usual filters: ties with the k-th best stay, `top_p` looks at the
    probabilities before temperature, and drops the token that crosses it (never the best one).
    """
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True, dim=-1)
        is_out = ordered.softmax(dim=-1).cumsum(dim=-1) > top_p
        is_out[..., 0] = False
        logits = logits.masked_fill(is_out.scatter(-1, order, is_out), float("-inf"))
    return logits
