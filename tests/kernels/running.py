"""Prompts of several lengths through an engine's slots, on a tiny network."""

from __future__ import annotations

import random

import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.sequence import Sequence
from pipeline.engine.stopping import StopRules
from pipeline.models.tiny import TinyModel
from pipeline.records import ImageFacts, Request, SampleRef


def run_prompts(
    model: TinyModel,
    dtype: torch.dtype,
    sampling: SamplingSettings,
    rules: StopRules,
    num_prompts: int,
) -> list[Sequence]:
    """Run random prompts of 1 to 30 tokens through 8 slots; return them in their order."""
    shape = EngineShape(8, 4, 30, dtype, torch.device("cpu"))
    engine = Engine(model, shape, sampling, rules)
    rng = random.Random(4)
    for index in range(num_prompts):
        ids = tuple(rng.choices(range(model.spec.vocab_size), k=rng.randint(1, 30)))
        ref = SampleRef("shard", index, f"key{index}", f"key{index}.png")
        engine.submit(Request(ref, ImageFacts(), ids))
    engine.close()
    ended: list[Sequence] = []
    while not engine.is_idle:
        ended += engine.step()
    return sorted(ended, key=lambda sequence: sequence.request.ref.index)
