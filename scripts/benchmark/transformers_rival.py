"""The transformers library's own `generate`: static left-padded batches, as most people run it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.benchmark.shapes import EOS_ID, NetworkShape
from scripts.benchmark.workload import Workload, left_padded, scaled_pixels, until_end


def is_installed() -> bool:
    """True if transformers can be imported here."""
    return importlib.util.find_spec("transformers") is not None


class TransformersModel:
    """The network as transformers loads and runs it, shared by contenders."""

    def __init__(
        self, shape: NetworkShape, folder: Path, dtype: torch.dtype, device: torch.device
    ) -> None:
        from transformers import SmolVLMForConditionalGeneration
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.shape = shape
        self.dtype = dtype
        self._model: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def generate(
        self, batch: Workload, on_step: Callable[[], None] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Caption one static batch, greedily, until its longest caption has ended."""
        ids, mask = left_padded(batch.requests, EOS_ID)
        pixels = self._pixels(batch)
        out = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=batch.max_new_tokens,
            do_sample=False,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
            stopping_criteria=[_Watch(on_step)] if on_step else None,
            **({"pixel_values": pixels} if len(pixels) else {}),
        )
        rows = out[:, ids.shape[1] :].tolist()
        return {
            request.ref.index: until_end(row, EOS_ID, batch.max_new_tokens)
            for request, row in zip(batch.requests, rows, strict=True)
        }

    @torch.inference_mode()
    def encode(self, batch: Workload) -> None:
        """Run the vision tower and the projector alone."""
        self._model.model.get_image_features(self._pixels(batch))

    def _pixels(self, batch: Workload) -> torch.Tensor:
        pixels = scaled_pixels(batch.shape, batch.requests)[:, None]
        return pixels.to(self._device, self.dtype)


class _Watch:
    """A stopping criterion that stops nothing, and tells of each step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self._on_step()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
