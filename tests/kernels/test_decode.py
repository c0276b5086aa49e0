"""The compiled kernels compute what torch's operations compute, on every kind of processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from pipeline.engine.sampling import best, chosen_logprobs_
from pipeline.kernels import decode, library
from pipeline.kernels.decode import StepAttention
from pipeline.kernels.library import Library
from pipeline.models.attention import RopeTables, attend, attention_bias, rope_tables, rotated
from pipeline.models.language import RMSNorm

pytestmark = pytest.mark.skipif(
    library.found() is None, reason="the kernels were not built: no C compiler"
)


def kinds() -> Iterator[Library]:
    """Yield the kernels that this processor can run, from the best to the plainest."""
    kernels = library.found()
    is_runnable = False
    for place in count():
        each = library.of_kind(place)
        if kernels is None or each is None:
            return
        is_runnable = is_runnable or each.kind == kernels.kind
        if is_runnable:
            yield each


KINDS = pytest.mark.parametrize("kernels", list(kinds()), ids=lambda kernels: kernels.kind)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Step:
    """One layer of a decode step, and what torch makes of it in float64."""

    def __init__(
        self, dtype: torch.dtype, num_rows: int, kv_heads: int, groups: int, head_dim: int
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows + head_dim)
        self.num_heads, self.num_kv_heads = kv_heads * groups, kv_heads
        num_columns = 45
        slots = (num_rows + 1, num_columns, kv_heads, head_dim)
        self.keys, self.values = (torch.randn(slots, generator=generator).to(dtype) for _ in "kv")
        self.lengths = torch.randint(0, num_columns, (num_rows,), generator=generator)
        self.lengths[0], self.lengths[-1] = 0, num_columns - 1
        drawn = torch.randn(
            num_rows, 1, self.num_heads + 2 * kv_heads, head_dim, generator=generator
        )
        self.heads = drawn.to(dtype)
        frequencies = 1 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
        self.tables: RopeTables = rope_tables(self.lengths[:, None], frequencies)

    def fused(self, kernels: Library) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the kernels make: the mixed values, and the slots with the new tokens."""
        keys, values = self.keys.clone(), self.values.clone()
        step = StepAttention(kernels, self.lengths, self.num_heads)
        mixed = step.attend(self.heads, self.tables.cos, self.tables.sin, keys, values)
        return mixed, keys, values

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same by torch, attention in float64."""
        queries, new_keys, new_values = rotated(self.heads, self.tables, self.num_kv_heads)
        keys, values = self.keys.clone(), self.values.clone()
        rows = torch.arange(len(self.lengths))
        keys[rows, self.lengths] = new_keys[:, :, 0]
        values[rows, self.lengths] = new_values[:, :, 0]
        mask = torch.arange(keys.shape[1]) <= self.lengths[:, None]
        slots = (kept[:-1].transpose(1, 2).double() for kept in (keys, values))
        bias = attention_bias(mask[:, None, None], torch.float64)
        return attend(queries.double(), *slots, bias), keys, values


@KINDS
@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "groups", "head_dim"),
    [(1, 1, 1, 16), (2, 3, 3, 64), (9, 3, 3, 64), (17, 2, 4, 64), (5, 2, 1, 80), (3, 4, 2, 128)],
)
def test_a_step_attends_as_torch_does(
    kernels: Library,
    dtype: torch.dtype,
    num_rows: int,
    kv_heads: int,
    groups: int,
    head_dim: int,
) -> None:
    step = Step(dtype, num_rows, kv_heads, groups, head_dim)
    (mixed, keys, values), (expected, all_keys, all_values) = step.fused(kernels), step.expected()
    exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
    assert torch.allclose(
        keys, all_keys, **exact
    )  # turned alike, but for a multiply-add's rounding
    assert torch.equal(values, all_values)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    assert (mixed.double() - expected).abs().max() <= tolerance * max(1, expected.abs().max())


@KINDS
@DTYPES
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(
    kernels: Library, dtype: torch.dtype
) -> None:
    step = Step(dtype, 24, 3, 3, 64)
    together, keys, values = step.fused(kernels)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for rows in (slice(0, 1), slice(5, 8)):
            alone = StepAttention(kernels, step.lengths[rows].clone(), step.num_heads).attend(
                step.heads[rows],
                step.tables.cos[rows].contiguous(),
                step.tables.sin[rows].contiguous(),
                keys[rows].clone(),
                values[rows].clone(),
            )
            assert torch.equal(alone, together[rows])
    finally:
        torch.set_num_threads(num_threads)


@KINDS
def test_what_lies_behind_a_sequence_is_never_seen(kernels: Library) -> None:
    step = Step(torch.bfloat16, 6, 3, 3, 64)
    clean, _, _ = step.fused(kernels)
    for row, length in enumerate(step.lengths.tolist()):
        step.keys[row, length + 1 :] = math.nan
        step.values[row, length + 1 :] = math.inf
    assert torch.equal(step.fused(kernels)[0], clean)


@KINDS
def test_a_key_that_is_not_finite_reaches_the_result(kernels: Library) -> None:
    step = Step(torch.float32, 3, 1, 2, 64)
    step.keys[2, 0] = math.nan
    mixed, _, _ = step.fused(kernels)
    assert mixed[2].isnan().all()
    assert mixed[:2].isfinite().all()


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 1, 576), (3, 50, 37)])
def test_a_norm_is_that_of_float64_rounded(
    kernels: Library, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "found", lambda: kernels)
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    norm = RMSNorm(shape[-1], 1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(1 + torch.randn(shape[-1], generator=generator) / 4)
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(norm(x).double(), exact, rtol=tolerance, atol=1e-9)


@KINDS
@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 5, 256, 4099])
def test_the_best_token_and_its_probability_are_torchs(
    kernels: Library, dtype: torch.dtype, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "found", lambda: kernels)
    generator = torch.Generator().manual_seed(vocab_size)
    # bfloat16 has many equal logits: the first of them it must be.
    logits = (4 * torch.randn(9, vocab_size, generator=generator)).to(dtype)
    found = decode.best(logits)
    assert found is not None
    expected = best(logits.float())
    assert torch.equal(found[0], expected)
    logprobs = chosen_logprobs_(logits.double(), expected)
    assert torch.allclose(found[1], logprobs, rtol=1e-6, atol=1e-6)


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 98])
def test_a_probability_is_nan_where_a_logit_is_not_finite(
    kernels: Library, bad: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "found", lambda: kernels)
    logits = torch.zeros(2, 99)
    logits[1, place] = bad
    found = decode.best(logits)
    assert found is not None
    assert found[1].isnan().tolist() == [False, True]


def test_what_the_kernels_cannot_do_is_left_to_torch() -> None:
    x = torch.randn(4, 64)
    assert decode.rms_norm(x, torch.ones(64), 1e-5) is not None
    assert decode.rms_norm(x.double(), torch.ones(64).double(), 1e-5) is None
    assert decode.rms_norm(x.T, torch.ones(4), 1e-5) is None
    assert decode.rms_norm(x.requires_grad_(), torch.ones(64), 1e-5) is None
    assert decode.best(torch.zeros(2, 8, dtype=torch.float64)) is None
    assert decode.can_attend(torch.zeros(2, 8, 1, 64)) is not None
    assert decode.can_attend(torch.zeros(2, 8, 1, 6)) is None
    assert decode.can_attend(torch.zeros(2, 8, 1, 512)) is None
    assert decode.can_attend(torch.zeros(2, 8, 1, 64).double()) is None
