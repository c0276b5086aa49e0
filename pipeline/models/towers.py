"""Vision configs and tensor names of the transformers library, for our vision transformer."""

from __future__ import annotations

from pipeline.models.config import Config
from pipeline.models.llama import Sources
from pipeline.models.matrices import ACTIVATIONS
from pipeline.models.vision import VisionSpec
from pipeline.models.weights import Source

_BLOCK_NAMES = (
    ("attention_norm", "layer_norm1"),
    ("out", "self_attn.out_proj"),
    ("mlp_norm", "layer_norm2"),
    ("up", "mlp.fc1"),
    ("down", "mlp.fc2"),
)


def activation_name(config: Config, key: str, default: str) -> str:
    """Read an activation's name; CheckpointError for one that we do not have."""
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        raise config.wrong(key, name, ", ".join(ACTIVATIONS))
    return name


def tower_sources(spec: VisionSpec, prefix: str) -> Sources:
    """Say which stored tensors become a SigLIP, Idefics3 or CLIP tower's parameters."""
    embeddings = f"{prefix}.embeddings"
    sources: Sources = {
        "vision.patches.weight": (Source((f"{embeddings}.patch_embedding.weight",)),),
        "vision.positions": (Source((f"{embeddings}.position_embedding.weight",)),),
    }
    norms = []
    if spec.has_class_token:
        sources["vision.class_token"] = (Source((f"{embeddings}.class_embedding",)),)
        norms.append(("pre_norm", "pre_layrnorm"))  # their spelling
    else:
        sources["vision.patches.bias"] = (Source((f"{embeddings}.patch_embedding.bias",)),)
    if not spec.feature_layers:
        norms.append(("norm", "post_layernorm"))
    for leaf in ("weight", "bias"):
        for ours, theirs in norms:
            sources[f"vision.{ours}.{leaf}"] = (Source((f"{prefix}.{theirs}.{leaf}",)),)
        for layer in range(spec.num_blocks):
            block = f"{prefix}.encoder.layers.{layer}"
            for ours, theirs in _BLOCK_NAMES:
                name = f"vision.blocks.{layer}.{ours}.{leaf}"
                sources[name] = (Source((f"{block}.{theirs}.{leaf}",)),)
            sources[f"vision.blocks.{layer}.qkv.{leaf}"] = tuple(
                Source((f"{block}.self_attn.{part}_proj.{leaf}",), spec.hidden_size)
                for part in "qkv"
            )
    return sources
