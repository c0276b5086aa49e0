"""Rows rounded to 8 bits and scaled back: the same numbers from C as from torch."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.kernels import library, rounding
from pipeline.kernels.library import Library
from tests.kernels.test_decode import DTYPES, KINDS

pytestmark = pytest.mark.skipif(
    library.found() is None, reason="the kernels were not built: no C compiler"
)
WIDTHS = pytest.mark.parametrize("width", [16, 37, 260, 576])


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@KINDS
@DTYPES
@WIDTHS
def test_rows_are_rounded_by_their_own_largest_number(
    kernels: Library, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(3, 4, width) * torch.logspace(-6, 6, 12).view(3, 4, 1)
    x[1, 2], x[2, 3, -1] = 0, 1e9
    x = x.to(dtype)
    monkeypatch.setattr(library, "found", lambda: kernels)
    values, steps = rounding.round_rows(x)
    assert values.shape == x.shape
    assert values.dtype == torch.uint8
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(steps, largest / 127, rtol=1e-6, atol=0)
    back = (values.float() - 128) * steps
    assert bool(((back - x.float()).abs() <= 0.501 * steps).all())
    assert set(values.view(12, -1)[11, -1:].tolist()) <= {1, 255}
    monkeypatch.setattr(library, "found", lambda: None)
    plain_values, plain_steps = rounding.round_rows(x)
    assert torch.equal(plain_steps, steps)
    # Where a number lies in the middle, the compiler's fused arithmetic may see it on a side.
    assert int((plain_values.int() - values.int()).abs().max()) <= 1
    assert float((plain_values != values).float().mean()) < 0.01


@KINDS
@DTYPES
@WIDTHS
def test_rows_are_scaled_added_and_gated_as_torch_does_it(
    kernels: Library, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y, other = (100 * drawn(2, 3, width)).to(dtype), drawn(2, 3, width, seed=4).to(dtype)
    both = (300 * drawn(2, 3, 2 * width, seed=5)).to(dtype)
    steps = drawn(2, 3, 1, seed=6).abs()
    made = []
    for found in (kernels, None):
        monkeypatch.setattr(library, "found", lambda found=found: found)
        made.append(
            (
                rounding.scale_rows_(y.clone(), steps),
                rounding.scale_rows_(y.clone(), steps, other),
                rounding.gate_rows(both, steps),
            )
        )
    for one, plain in zip(*made, strict=True):
        tolerance = 2 * torch.finfo(dtype).eps
        assert one.dtype == dtype
        torch.testing.assert_close(one, plain, rtol=tolerance, atol=1e-5)


@KINDS
@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 31, 36])
def test_a_row_that_is_not_finite_does_not_become_finite(
    kernels: Library,
    dtype: torch.dtype,
    bad: float,
    place: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only so is it seen that a network is broken."""
    x = drawn(3, 37).to(dtype)
    x[1, place] = bad
    for found in (kernels, None):
        monkeypatch.setattr(library, "found", lambda found=found: found)
        _, steps = rounding.round_rows(x)
        assert steps.isfinite().flatten().tolist() == [True, False, True]
