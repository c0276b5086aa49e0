"""Stages alone: a decode step at several numbers of rows, vision at several batch sizes.

Steps are timed where each contender itself takes them: `Engine.step` here, from one call of the
stopping criteria to the next in `generate`. Prefills are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.stopping import StopRules
from pipeline.models.attention import KeyValues
from pipeline.models.language import DecoderSpec
from pipeline.models.vlm import CaptionModel
from pipeline.records import ImageFacts, ImageInputs, Request, SampleRef
from scripts.benchmark.clock import now
from scripts.benchmark.openvino_rival import OpenVINO
from scripts.benchmark.shapes import EOS_ID
from scripts.benchmark.transformers_rival import TransformersModel
from scripts.benchmark.workload import Workload

NUM_STEPS = 17
WARM_STEPS = 3
NULL_SLOTS = 64
CPU = torch.device("cpu")


def engine_step(
    model: CaptionModel,
    requests: Sequence[Request],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> float:
    """Return the median seconds of our engine's decode step with these requests live."""
    longest = max(len(request.prompt_ids) for request in requests)
    engine = Engine(
        model,
        EngineShape(len(requests), len(requests), longest, dtype, device),
        SamplingSettings(max_new_tokens=64),
        StopRules(frozenset({EOS_ID}), 64),
    )
    for request in requests:
        engine.submit(request)
    engine.close()
    while engine.num_waiting:
        engine.step()
    # On a GPU each step itself waits for the one before it, and must not for more.
    tick = now if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(NUM_STEPS):
        began = tick()
        engine.step()
        seconds.append(tick() - began)
    return statistics.median(seconds[WARM_STEPS:])


def transformers_step(model: TransformersModel, batch: Workload) -> float:
    """Return the median seconds of a decode step in transformers."""
    moments: list[float] = []
    model.generate(batch.shortened(NUM_STEPS + 1), on_step=lambda: moments.append(now()))
    return _median_step(moments)


def openvino_step(worker: OpenVINO, batch: Workload) -> float:
    """Return the median seconds of a decode step in OpenVINO."""
    moments: list[float] = worker.ask("generate", batch.shortened(NUM_STEPS + 1))["moments"]
    return _median_step(moments)


def _median_step(moments: Sequence[float]) -> float:
    return statistics.median([b - a for a, b in pairwise(moments)][WARM_STEPS:])


def vision(encode: Callable[[], object], num_tries: int = 3) -> float:
    """Return the least seconds of encoding a batch of pictures: others only add to it."""
    seconds = []
    for _ in range(num_tries):
        began = now()
        encode()
        seconds.append(now() - began)
    return min(seconds)


def encode_ours(model: CaptionModel, batch: Workload) -> None:
    """Run our own tower and projector."""
    with torch.inference_mode():
        model.encode_images([r.images for r in batch.requests if r.images is not None])


class NullNetwork:
    """A network that answers at once: what remains of a step is the engine itself."""

    image_token_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.spec = DecoderSpec(1, 1, 1, 8, 8, 8, vocab_size)
        self._logits = torch.zeros(NULL_SLOTS, vocab_size)
        self._logits[:, -1] = 1.0

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return nothing: no request has a picture."""
        return []

    def next_logits(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        mask: Tensor,
        kv: KeyValues | None,
    ) -> Tensor:
        """Return the same logits every time."""
        return self._logits[: len(ids)]


def overhead(vocab_size: int) -> float:
    """Return the engine's own seconds in a step of 64 slots."""
    facts = ImageFacts()
    requests = [
        Request(SampleRef("null", i, str(i), str(i)), facts, tuple(range(1, 40)))
        for i in range(NULL_SLOTS)
    ]
    return engine_step(NullNetwork(vocab_size), requests, torch.float32)
