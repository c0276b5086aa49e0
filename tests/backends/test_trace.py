"""Where two captions part: found without the token ids, which no row holds."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from pipeline.backends.native import NativeCaptioner
from pipeline.backends.placement import Placement
from pipeline.backends.scripted import ScriptedSettings, ScriptedSource
from pipeline.backends.trace import first_difference
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.models.tiny import TinyModel
from pipeline.processors.tiny import LETTERS, TinyProcessor
from pipeline.records import ImageFacts, Request, SampleRef
from tests.backends.sources import ListSource

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def captioner() -> NativeCaptioner:
    return NativeCaptioner(
        TinyModel().double().eval(),
        TinyProcessor(),
        Placement(torch.device("cpu"), torch.float64),
        SamplingSettings(max_new_tokens=NUM_TOKENS, max_repeats=0),
        SpeedSettings(slots=1, prefill_batch=1),
    )


def request_of(captioner: NativeCaptioner, seed: int) -> Request:
    image = Image.new("RGB", (8, 8), (40 * seed % 255, 9 * seed % 255, 77))
    ref = SampleRef("shard", seed, f"k{seed}", f"k{seed}.png")
    return captioner.prepare(ref, ImageFacts(), image, "what is it", {})


def caption_of(captioner: NativeCaptioner, request: Request) -> str:
    (answer,) = captioner.caption(ListSource([request]))
    assert answer.text
    return answer.text


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_letter_is_found_with_both_logits(captioner: NativeCaptioner, seed: int) -> None:
    request = request_of(captioner, seed)
    fresh = caption_of(captioner, request)
    place = len(fresh) // 2
    while fresh[place] == " " or fresh[place - 1] == " ":
        place -= 1
    other = "x" if fresh[place] != "x" else "y"
    stored = fresh[:place] + other + fresh[place + 1 :]
    found = first_difference(captioner, request, stored, fresh, NUM_TOKENS)
    assert found is not None
    assert (found.stored, found.fresh) == (other, fresh[place])
    assert found.place >= place  # blanks at the beginning are tokens too
    assert found.fresh_logit > found.stored_logit  # greedy took the likelier one
    assert found.gap == found.fresh_logit - found.stored_logit


def test_a_caption_that_ended_early_parts_at_the_end_token(captioner: NativeCaptioner) -> None:
    request = request_of(captioner, 1)
    fresh = caption_of(captioner, request)
    stored = fresh[:3].rstrip()
    found = first_difference(captioner, request, stored, fresh, NUM_TOKENS)
    assert found is not None
    assert found.stored == "the end"
    assert found.fresh in LETTERS


def test_equal_captions_and_other_backends_show_nothing(captioner: NativeCaptioner) -> None:
    request = request_of(captioner, 2)
    assert first_difference(captioner, request, "same", "same", NUM_TOKENS) is None
    scripted = ScriptedSource(ScriptedSettings()).load(SamplingSettings(), SpeedSettings())
    assert first_difference(scripted, request, "one", "two", NUM_TOKENS) is None


def test_text_that_no_token_begins_shows_nothing(captioner: NativeCaptioner) -> None:
    request = request_of(captioner, 3)
    fresh = caption_of(captioner, request)
    assert first_difference(captioner, request, fresh[:2] + "中文", fresh, NUM_TOKENS) is None
