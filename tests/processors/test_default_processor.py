"""The default model's processor and its byte-pair tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.processors.bpe import NUM_BYTES, BytePairTokenizer
from pipeline.processors.default import NUM_IMAGE_TOKENS, TILE_SIZE, DefaultProcessor

PROCESSOR = DefaultProcessor()
ODD_SIZES = [(1, 1), (1, 10_000), (10_000, 1), (2, 3), (4000, 3000), (257, 257), (640, 480)]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_every_text_round_trips(text: str) -> None:
    """What is tokenised and detokenised is the text, but for the spaces around it."""
    encodable = text.encode("utf-8", errors="replace").decode("utf-8")
    assert PROCESSOR.detokenise(PROCESSOR.tokenise(text)) == encodable.strip()


def test_special_tokens_are_never_read_from_text() -> None:
    """A prompt that spells a special token is text like any other."""
    ids = PROCESSOR.tokenise("<eos><image><pad>")
    assert not set(ids) & set(PROCESSOR.tokenizer.specials.values())
    assert PROCESSOR.detokenise(ids) == "<eos><image><pad>"


def test_special_tokens_say_nothing() -> None:
    """Ending and image tokens leave no trace in the text."""
    ids = [PROCESSOR.image_token_id, *PROCESSOR.tokenise("a photo"), *PROCESSOR.eos_ids]
    assert PROCESSOR.detokenise(ids) == "a photo"


def test_merges_apply_in_the_order_learnt() -> None:
    """The earliest merge goes first, and the leftmost of equals."""
    first, second = NUM_BYTES, NUM_BYTES + 1
    a, b = b"ab"
    tokenizer = BytePairTokenizer([(a, b), (a, a)], {})
    assert tokenizer.encode("aab") == [a, first]
    assert tokenizer.encode("aaa") == [second, a]


@pytest.mark.parametrize("size", ODD_SIZES)
def test_pictures_of_any_size_become_two_tiles(size: tuple[int, int]) -> None:
    """However small or thin a picture is, the network gets its two squares."""
    _, inputs = PROCESSOR.prepare(Image.new("RGB", size, (200, 30, 30)), "")
    assert inputs.pixels.shape == (2, 3, TILE_SIZE, TILE_SIZE)
    assert inputs.pixels.dtype == torch.uint8
    assert inputs.pixels[0, 0].float().mean() > 195


def test_image_places_come_before_the_prompt() -> None:
    """A prompt is the caption's opening: after the picture, without its trailing space."""
    ids, _ = PROCESSOR.prepare(Image.new("RGB", (8, 8)), "a photo of ")
    assert ids[:NUM_IMAGE_TOKENS] == (PROCESSOR.image_token_id,) * NUM_IMAGE_TOKENS
    assert PROCESSOR.detokenise(ids[NUM_IMAGE_TOKENS:]) == "a photo of"
    assert len(ids) == NUM_IMAGE_TOKENS + len(PROCESSOR.tokenise("a photo of"))


def test_threads_prepare_the_same_pictures() -> None:
    """One processor serves many threads."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    alone = PROCESSOR.prepare(picture, "this is")
    with ThreadPoolExecutor(4) as pool:
        for ids, inputs in pool.map(lambda _: PROCESSOR.prepare(picture, "this is"), range(12)):
            assert ids == alone[0]
            assert torch.equal(inputs.pixels, alone[1].pixels)
