"""A tower's activations and norms compute their formulas, each number and row by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipeline.kernels import tower
from pipeline.kernels.tower import activate_, can_activate, layer_norm
from pipeline.models import vision
from pipeline.models.linear import lay_out
from pipeline.models.matrices import ACTIVATIONS
from pipeline.models.vision import VisionBlock, VisionSpec

HAS_TILES = tower.found() is not None
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="no compiler, or a processor without tiles")
pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def drawn(*shape: int, spread: float = 1.0) -> Tensor:
    return (spread * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()


@needs_tiles
@pytest.mark.parametrize("activation", sorted(tower.ACTIVATIONS))
@pytest.mark.parametrize("spread", [0.1, 3, 1e3, 1e30])
def test_an_activation_is_that_of_float64_rounded(activation: str, spread: float) -> None:
    x = drawn(3, 41, 147, spread=spread)
    exact = ACTIVATIONS[activation](x.double())
    assert can_activate(x, activation)
    # Half a rounding step, and a tenth of that; float64's own tanh leaves 1e-13 near -1.
    assert torch.allclose(activate_(x, activation).double(), exact, rtol=1.1 * 2**-8, atol=1e-12)


@needs_tiles
def test_numbers_that_are_not_finite_stay_so_and_denormal_ones_are_kept_elsewhere() -> None:
    x = torch.tensor([math.nan, math.inf, -3e38, 0.0, 1.0]).bfloat16()
    assert str(activate_(x, "gelu_pytorch_tanh").tolist()) == "[nan, inf, -0.0, 0.0, 0.83984375]"
    assert (torch.full((9,), 1e-39) * 0.5 > 0).all()


@needs_tiles
@pytest.mark.parametrize("shape", [(1, 64), (5, 7, 768), (3, 50, 1152)])
@pytest.mark.parametrize("middle", [0, 50])
def test_a_norm_is_that_of_float64_rounded(shape: tuple[int, ...], middle: float) -> None:
    x = (drawn(*shape).float() * 3 + middle).bfloat16()
    norm = nn.LayerNorm(shape[-1], 1e-6)
    norm.weight.copy_(1 + drawn(shape[-1]) / 4)
    norm.bias.copy_(drawn(shape[-1]))
    exact = norm.bfloat16().double()(x.double())
    normed = layer_norm(x, norm.bfloat16())
    assert torch.allclose(normed.double(), exact, rtol=1.01 * 2**-8, atol=1e-5)


@needs_tiles
def test_neither_neighbours_nor_threads_change_a_row() -> None:
    x, norm = drawn(200, 768), nn.LayerNorm(768).bfloat16()
    normed, activated = layer_norm(x, norm), activate_(x.clone(), "quick_gelu")
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows = x[57:90].clone()
            assert torch.equal(layer_norm(rows, norm), normed[57:90])
            assert torch.equal(activate_(rows, "quick_gelu"), activated[57:90])
    finally:
        torch.set_num_threads(num_threads)


def test_what_the_kernels_cannot_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 128)
    assert can_activate(x, "quick_gelu") == HAS_TILES
    assert not can_activate(x, "gelu")
    assert not can_activate(x.float(), "quick_gelu")
    with torch.inference_mode(False):
        assert not can_activate(x, "quick_gelu")  # its gradient may be wanted
    odd, plain = nn.LayerNorm(100).bfloat16(), nn.LayerNorm(128).bfloat16()
    assert torch.equal(layer_norm(x[:, :100], odd), odd(x[:, :100]))
    assert torch.equal(layer_norm(x.float(), plain.float()), plain(x.float()))
    monkeypatch.setattr(tower, "found", lambda: None)
    assert not can_activate(x, "quick_gelu")
    assert torch.equal(layer_norm(x, plain.bfloat16()), plain(x))


@needs_tiles
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "quick_gelu", "gelu"])
def test_a_block_computes_the_same_with_the_kernels_and_without(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    spec = VisionSpec(128, 256, 1, 2, image_size=64, patch_size=8, activation=activation)
    block = VisionBlock(spec).eval()
    x = drawn(2, 64, 128)
    exact = block.double()(x.double(), None)
    block = block.bfloat16()
    lay_out(block)
    with_kernels = block(x, None)
    monkeypatch.setattr(tower, "found", lambda: None)
    monkeypatch.setattr(vision, "attend_to_all", lambda heads, mask: None)
    without = block(x, None)
    assert not torch.equal(with_kernels, without)  # they were used
    errors, torchs = ((each - exact).square().mean() for each in (with_kernels, without))
    assert errors <= 1.1 * torchs
