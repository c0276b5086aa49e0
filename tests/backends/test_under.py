"""One network under several settings: the weights are shared, nothing else is."""

from __future__ import annotations

import pytest
from PIL import Image

from pipeline.backends.resolve import resolve
from pipeline.captioner import Captioner, Ready, SamplingSettings, SpeedSettings
from pipeline.records import Caption, ImageFacts, SampleRef


def ask(captioner: Captioner) -> Caption:
    picture = Image.new("RGB", (64, 64), "red")
    request = captioner.prepare(SampleRef("", 0, "a", "a"), ImageFacts(), picture, "", {})
    (caption,) = captioner.caption(Ready([request]))
    return caption


@pytest.mark.parametrize("model", ["default", "scripted"])
def test_each_has_settings_and_counters_of_its_own(model: str) -> None:
    speed = SpeedSettings(slots=2, prefill_batch=1, threads=1)
    one = resolve(model).load(SamplingSettings(), speed)
    wanted = ask(one)
    before = one.counters.new_tokens
    other = one.under(SamplingSettings(max_new_tokens=1), SpeedSettings(slots=1, prefill_batch=1))
    assert other.counters.new_tokens == 0
    found = ask(other)
    if model == "default":
        assert (found.num_caption_tokens, found.finish_reason) == (1, "length")
    assert one.counters.new_tokens == before > 0
    again = ask(one)
    assert (again.text, again.num_caption_tokens) == (wanted.text, wanted.num_caption_tokens)
