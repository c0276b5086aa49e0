"""Drawing tokens: filters, seeds, penalties."""

from __future__ import annotations

import pytest
import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.said import said_so_far
from pipeline.engine.sampling import Sampler, draw, penalise
from pipeline.engine.sequence import Sequence, row_random
from pipeline.errors import RequestError
from tests.engine.laws import make_request

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])


def drawn_ids(**filters: float) -> set[int]:
    uniforms = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]
    return set(draw(LOGITS.expand(400, -1), uniforms, **filters).tolist())  # type: ignore[arg-type]


def test_frequencies_of_drawn_tokens_are_the_softmax() -> None:
    uniforms = torch.linspace(0, 1, 20_001, dtype=torch.float64)[:-1]
    counts = draw(LOGITS.expand(20_000, -1), uniforms).bincount(minlength=4)
    assert torch.allclose(counts / 20_000, LOGITS.softmax(-1)[0], atol=1e-3)


def test_top_k_keeps_the_best() -> None:
    assert drawn_ids(top_k=2) == {0, 2}
    assert drawn_ids(top_k=99) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    best = LOGITS.softmax(-1)[0, 0].item()  # 0.64
    assert drawn_ids(top_p=best - 0.01) == {0}
    assert drawn_ids(top_p=best + 0.01) == {0, 2}
    assert drawn_ids(top_p=1e-9) == {0}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_uniform_range_stay_among_the_kept(uniform: float) -> None:
    ends = torch.tensor([uniform], dtype=torch.float64)
    assert draw(LOGITS, ends, top_p=0.7).item() in {0, 2}
    assert draw(LOGITS, ends, top_k=1).item() == 0


def test_a_penalty_lowers_what_was_said_and_nothing_else() -> None:
    found = penalise(LOGITS.expand(2, -1), said_so_far([[0, 3, 0], []], 5), 2.0)
    assert found.tolist() == [[1.0, 0.0, 1.0, -2.0], *LOGITS.tolist()]


def test_no_end_token_before_the_least_length() -> None:
    sampler = Sampler(SamplingSettings(min_new_tokens=2), frozenset({0}))
    sequence = Sequence(make_request(0, [1]), 0, row_random(0, "a", 0))
    assert sampler.choose(LOGITS, [sequence])[0] == [2]
    sequence.append(2, -1.0)
    sequence.append(2, -1.0)
    assert sampler.choose(LOGITS, [sequence])[0] == [0]


def test_the_log_probability_is_the_networks_own() -> None:
    sampler = Sampler(SamplingSettings(temperature=0.1, top_k=1), frozenset())
    sequence = Sequence(make_request(0, [1]), 0, row_random(0, "a", 0))
    _, (logprob,) = sampler.choose(LOGITS, [sequence])
    assert logprob == pytest.approx(LOGITS.log_softmax(-1)[0, 0].item())


def test_row_random_tells_seed_key_and_caption_index_apart() -> None:
    names = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a\udcff", 0), (0, "0", 10)]
    assert len({row_random(*name).random() for name in names}) == len(names)
    assert row_random(5, "key", 2).random() == row_random(5, "key", 2).random()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
        ({"min_new_tokens": 65}, "--min-new-tokens is 65"),
        ({"num_captions": 3}, "needs --temperature"),
        ({"top_k": 5}, "need --temperature"),
        ({"stop": ("",)}, "--stop is"),
        ({"max_repeats": 1}, "--max-repeats is 1"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        SamplingSettings(**settings)  # type: ignore[arg-type]
