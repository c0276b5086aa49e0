"""The engine gives the same captions with the kernels and without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.sequence import Sequence
from pipeline.engine.stopping import StopRules
from pipeline.kernels import decode, library
from pipeline.models.tiny import TINY_SPEC, TinyModel
from tests.kernels.running import run_prompts

pytestmark = pytest.mark.skipif(
    library.found() is None, reason="the kernels were not built: no C compiler"
)
SPEC = replace(TINY_SPEC, head_dim=16, num_heads=6)
RULES = StopRules(frozenset({10, 33, 58}), max_new_tokens=24)


def captions(sampling: SamplingSettings) -> list[Sequence]:
    """Run 40 prompts of several lengths through 8 slots."""
    return run_prompts(TinyModel(SPEC).eval(), torch.float32, sampling, RULES, 40)


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
    assert len(fused) == len(plain) == 40
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.mean_logprob == pytest.approx(theirs.mean_logprob, abs=1e-4)
