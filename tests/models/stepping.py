"""Greedy decoding step by step with the logits kept, for comparisons with reference logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.engine.cache import KVCache
from pipeline.engine.padding import left_pad
from pipeline.models.vlm import VisionLanguageModel
from pipeline.records import ImageInputs


@torch.inference_mode()
def greedy_steps(
    model: VisionLanguageModel,
    prompts: Sequence[Sequence[int]],
    images: Sequence[ImageInputs],
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Decode prompts as one left-padded batch with the cache; logits `[N, B, V]`, ids `[B, N]`."""
    device = torch.device("cpu")
    dtype = next(model.parameters()).dtype
    columns = max(len(prompt) for prompt in prompts) + num_tokens
    cache = KVCache(model.spec, len(prompts), columns, dtype, device)
    padded = left_pad([list(prompt) for prompt in prompts], device)
    features = model.encode_images(images) if images else []
    rows = range(len(prompts))
    logits = model.next_logits(
        padded.ids,
        torch.cat(features) if features else None,
        padded.positions,
        padded.mask,
        cache.prefill_view(rows, padded),
    )
    steps, tokens = [logits], [logits.argmax(dim=-1)]
    while len(steps) < num_tokens:
        view = cache.decode_view(len(prompts))
        logits = model.next_logits(tokens[-1][:, None], None, view.positions, view.mask, view)
        cache.advance(range(len(prompts)))
        steps.append(logits)
        tokens.append(logits.argmax(dim=-1))
    return torch.stack(steps), torch.stack(tokens, dim=1)


@torch.inference_mode()
def uncached_logits(
    model: VisionLanguageModel, prompt: Sequence[int], images: Sequence[ImageInputs]
) -> Tensor:
    """Return the logits `[V]` that follow one prompt, run alone and without a cache."""
    padded = left_pad([list(prompt)], torch.device("cpu"))
    features = torch.cat(model.encode_images(images)) if images else None
    return model.next_logits(padded.ids, features, padded.positions, padded.mask, None)[0]
