"""One set of random weights for every contender: a folder that transformers can load too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.models.idefics3 import weight_layout
from pipeline.models.vlm import VisionLanguageModel
from pipeline.models.weights import load_weights, unfilled
from scripts.benchmark.shapes import EOS_ID, NetworkShape, fill_random

WEIGHTS_SEED = 0
CPU = torch.device("cpu")


def write_checkpoint(shape: NetworkShape, work: Path) -> Path:
    """Write the folder of a shape unless it is there; float32, and returned once it is whole."""
    folder = work / f"{shape.name}-{WEIGHTS_SEED}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = shape.build()
    fill_random(model, shape.ladder, WEIGHTS_SEED)
    save_file(stored_tensors(shape, model), partial / "model.safetensors", {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(transformers_config(shape), indent=1))
    partial.rename(folder)
    return folder


def stored_tensors(shape: NetworkShape, model: VisionLanguageModel) -> dict[str, Tensor]:
    """Take our stacked parameters apart into tensors of the names that transformers knows."""
    stored: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for name, sources in weight_layout(shape.layout_spec).sources.items():
        rows = parameters[name].detach()
        start = 0
        for source in sources:
            end = start + source.rows if source.rows else len(rows)
            stored[source.names[0]] = rows[start:end].contiguous()
            start = end
    return stored


def load_ours(
    shape: NetworkShape, folder: Path, dtype: torch.dtype, device: torch.device = CPU
) -> VisionLanguageModel:
    """Load our own network from the folder."""
    with unfilled():
        model = shape.build()
    load_weights(model, weight_layout(shape.layout_spec), folder, dtype, device)
    return model.eval()


def transformers_config(shape: NetworkShape) -> dict[str, object]:
    """Say the sizes as SmolVLM's config.json does.

    nanoVLM's network is the same one: a SigLIP tower, pixel shuffle, one matrix, a llama decoder.
    """
    vision, text = shape.vision, shape.decoder
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": shape.image_token_id,
        "scale_factor": shape.shuffle_factor,
        "tie_word_embeddings": False,
        "pad_token_id": EOS_ID,
        "torch_dtype": "float32",
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "max_image_size": {"longest_edge": vision.image_size},
        },
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads,
            "head_dim": text.head_dim,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.max_positions,
            "rms_norm_eps": text.norm_eps,
            "rope_theta": text.rope_theta,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
        },
    }
