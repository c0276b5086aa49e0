"""Each rule that ends a caption."""

from __future__ import annotations

import pytest

from pipeline.engine.stopping import StopRules, is_repeating


def rules(**changes: object) -> StopRules:
    settings: dict[str, object] = {"eos_ids": frozenset({9}), "max_new_tokens": 50}
    return StopRules(**(settings | changes))  # type: ignore[arg-type]


def test_the_end_token_comes_before_every_other_reason() -> None:
    assert rules(max_new_tokens=2, max_repeats=2).finish_reason([9, 9]) == "eos"


def test_length_is_the_reason_only_where_no_other_is() -> None:
    assert rules(max_new_tokens=3).finish_reason([1, 2]) is None
    assert rules(max_new_tokens=3).finish_reason([1, 2, 3]) == "length"
    assert rules(max_new_tokens=2, has_stop_text=lambda ids: True).finish_reason([1, 2]) == "stop"


@pytest.mark.parametrize("period", [1, 2, 5, 11, 40])
def test_a_loop_of_any_period_is_told(period: int) -> None:
    block = list(range(period))
    loop = [100, 101, *block * 30]
    found = next(n for n in range(1, len(loop) + 1) if is_repeating(loop[:n], 4))
    assert found - 2 == max(4 * period, 24)


def test_what_only_looks_like_a_loop_goes_on() -> None:
    assert not is_repeating([1, 2, 3] * 7, 4)  # 21 tokens: "very, very, very" may be meant
    assert not is_repeating([*[1, 2, 3, 4, 5, 6] * 3, 1, 2, 3, 4, 5, 7], 4)
    assert not is_repeating([1], 4)
    assert rules(max_repeats=0).finish_reason([1] * 40) is None
    assert rules(max_repeats=4).finish_reason([1] * 40) == "repetition"
