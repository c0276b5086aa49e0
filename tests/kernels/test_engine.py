"""The engine gives the same captions with the kernels and without them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.sequence import Sequence
from pipeline.engine.stopping import StopRules
from pipeline.kernels import decode, library
from pipeline.models.tiny import TINY_SPEC, TinyModel
from pipeline.records import ImageFacts, Request, SampleRef

pytestmark = pytest.mark.skipif(
    library.found() is None, reason="the kernels were not built: no C compiler"
)
SPEC = replace(TINY_SPEC, head_dim=16, num_heads=6)
RULES = StopRules(frozenset({10, 33, 58}), max_new_tokens=24)


def captions(sampling: SamplingSettings) -> dict[int, Sequence]:
    """Run 40 prompts of several lengths through 8 slots."""
    model = TinyModel(SPEC).eval()
    engine = Engine(
        model, EngineShape(8, 4, 30, torch.float32, torch.device("cpu")), sampling, RULES
    )
    rng = random.Random(4)
    for index in range(40):
        ids = tuple(rng.choices(range(SPEC.vocab_size), k=rng.randint(1, 30)))
        ref = SampleRef("shard", index, f"key{index}", f"key{index}.png")
        engine.submit(Request(ref, ImageFacts(), ids))
    engine.close()
    ended: list[Sequence] = []
    while not engine.is_idle:
        ended += engine.step()
    return {sequence.request.ref.index: sequence for sequence in ended}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(),
        SamplingSettings(min_new_tokens=5),
        SamplingSettings(repetition_penalty=1.3),
        SamplingSettings(temperature=0.8, top_p=0.9),
    ],
)
def test_captions_are_the_same_with_the_kernels_and_without(
    sampling: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    attend = decode.StepAttention.attend

    def counted(self: decode.StepAttention, *given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return attend(self, *given)

    monkeypatch.setattr(decode.StepAttention, "attend", counted)
    fused = captions(sampling)
    assert calls
    monkeypatch.setattr(library, "found", lambda: None)
    calls.clear()
    plain = captions(sampling)
    assert not calls
    assert fused.keys() == plain.keys() == set(range(40))
    for index, sequence in fused.items():
        assert sequence.token_ids == plain[index].token_ids
        assert sequence.finish_reason == plain[index].finish_reason
        assert sequence.mean_logprob == pytest.approx(plain[index].mean_logprob, abs=1e-4)
