"""Products of 8-bit numbers, and vision towers that are made of them."""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch
from torch import Tensor

from pipeline.models import int8
from pipeline.models.int8 import Grid, Int8Matrix, rounded_rows, what_is_missing
from pipeline.models.matrices import ACTIVATIONS
from pipeline.models.quantising import CLIPS, Quantised, Seen, _best, coarse, quantise
from pipeline.models.tiny import TinyModel
from pipeline.models.vision import VisionBlock, VisionSpec, VisionTransformer

pytestmark = pytest.mark.skipif(
    what_is_missing(torch.float32) is not None, reason="no fast 8-bit products here"
)
HAS_HALF = what_is_missing(torch.bfloat16) is None
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, *([torch.bfloat16] if HAS_HALF else [])], ids=str
)


def drawn(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(
    x: Tensor, weight: Tensor, bias: Tensor, grid: Grid, activation: str | None = None
) -> Tensor:
    """Return what a product of the rounded numbers is, in float64."""
    scales, values = rounded_rows(weight)
    inputs = (grid.nearest(x).double() - grid.zero) * grid.step
    result = inputs @ (values.double() * scales.double()[:, None]).T + bias.double()
    return ACTIVATIONS[activation](result) if activation else result


@DTYPES
@pytest.mark.parametrize("activation", [None, *int8.FUSED])
@torch.inference_mode()
def test_a_matrix_multiplies_the_rounded_numbers_exactly(
    dtype: torch.dtype, activation: str | None
) -> None:
    weight, bias = drawn(40, 24, seed=1), drawn(40, seed=2)
    x, grid = drawn(3, 5, 24).to(dtype), Grid(0.03, 117)
    matrix = Int8Matrix(weight, bias, grid, dtype)
    found = matrix(x) if activation is None else matrix.activated(x, activation)
    wanted = exact(x, weight, bias, grid, activation)
    assert found.dtype == dtype
    # The gelu by tanh is the exact one here, which is 0.0005 away at most.
    torch.testing.assert_close(found.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=5.5e-4)
    other = drawn(3, 5, 40, seed=5).to(dtype)
    torch.testing.assert_close(
        matrix.added(x, other).double(),
        exact(x, weight, bias, grid) + other.double(),
        rtol=4 * torch.finfo(dtype).eps,
        atol=1e-5 if dtype == torch.float32 else 0.03,
    )


@DTYPES
@torch.inference_mode()
def test_a_rounded_matrix_is_near_the_plain_one(dtype: torch.dtype) -> None:
    """Two roundings to half of a 127th of the largest number, of weights and of inputs."""
    weight, bias, x = drawn(96, 256, seed=1), drawn(96, seed=2), drawn(64, 256)
    grid = Grid(float(x.abs().max()) / 127)
    plain = x @ weight.T + bias
    found = Int8Matrix(weight, bias, grid, dtype)(x.to(dtype)).float()
    error = float((found - plain).norm() / plain.norm())
    assert 0.002 < error < 0.02


@DTYPES
@torch.inference_mode()
def test_no_row_of_a_product_depends_on_its_neighbours(dtype: torch.dtype) -> None:
    matrix = Int8Matrix(drawn(48, 64), drawn(48), Grid(0.02), dtype)
    x = drawn(33, 64).to(dtype)
    crowded = torch.cat((x, 1e4 * x, x))
    for row in (0, 7, 32):
        # A kernel for one row adds the bias in another order: the last bit at most.
        close = 2 * torch.finfo(dtype).eps
        alone = matrix(x[row : row + 1])[0]
        torch.testing.assert_close(matrix(crowded)[row], alone, rtol=close, atol=close)


@torch.inference_mode()
def test_results_can_be_values_on_a_grid_that_the_next_matrix_reads() -> None:
    weight, bias, x = drawn(24, 32, seed=1), drawn(24, seed=2), drawn(9, 32)
    grid, output = Grid(0.03), Grid(0.05, 4)
    values = Int8Matrix(weight, bias, grid, torch.float32, output).activated(x, "gelu")
    assert values.dtype == torch.uint8
    wanted = exact(x, weight, bias, grid, "gelu")
    kept = ((values.double() - output.zero) * output.step - wanted).abs()
    is_inside = wanted < (255 - output.zero) * output.step
    assert is_inside.any()
    assert float(kept[is_inside].max()) <= 0.51 * output.step
    assert not is_inside.all()
    assert bool((values[~is_inside] == 255).all())
    down = Int8Matrix(drawn(8, 24, seed=7), drawn(8, seed=8), output, torch.float32)
    numbers = ((values.float() - output.zero) * output.step).contiguous()
    torch.testing.assert_close(down(values), down(numbers))


@torch.inference_mode()
def test_both_ways_to_round_give_the_same_values_and_keep_within_the_ends() -> None:
    grid = Grid(0.37, 100)
    x = torch.cat((drawn(1000) * 40, torch.tensor([1e9, -1e9])))
    in_three, at_once = int8._round_in_three_passes(x, grid), int8._round_at_once(x, grid)
    assert torch.equal(in_three, at_once)
    assert at_once[-2:].tolist() == [255, 0]
    inside = (x > -100 * 0.37) & (x < 155 * 0.37)
    back = (at_once.float() - 100) * 0.37
    assert float((back - x)[inside].abs().max()) <= 0.51 * 0.37


def test_steps_are_eighths_of_an_octave_and_never_smaller() -> None:
    for step in (1e-9, 0.013, 1.0, 77.0):
        found = coarse(step)
        assert step <= found * (1 + 1e-12)
        assert found < step * 2 ** (1 / 8) * (1 + 1e-12)
        assert (8 * math.log2(found)) == pytest.approx(round(8 * math.log2(found)))
    assert coarse(0.0) == 1.0


def test_kernels_that_are_missing_slow_or_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = cycle([9.0, 1.0])
    monkeypatch.setattr(int8, "_seconds", lambda work: next(seconds))
    assert what_is_missing(torch.float32) == (
        "this processor's 8-bit products take 9 times those of float32"
    )
    right = Int8Matrix.__call__
    monkeypatch.setattr(Int8Matrix, "__call__", lambda self, x: right(self, x) * 0.5)
    assert what_is_missing(torch.float32) == "this processor's 8-bit products are off by 50%"

    def refuse(*_: object) -> None:
        raise RuntimeError("could not create a primitive\nat length")

    monkeypatch.setattr(Int8Matrix, "__call__", refuse)
    assert what_is_missing(torch.float32) == (
        "torch's 8-bit products do not run here (could not create a primitive)"
    )


def tower(activation: str = "gelu_pytorch_tanh", **settings: object) -> VisionTransformer:
    """Make a small tower whose channels, as trained ones', are of very different sizes."""
    spec = VisionSpec(64, 160, 3, 4, 32, 8, activation=activation, **settings)  # type: ignore[arg-type]
    made = VisionTransformer(spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            is_scale = "norm" in name and name.endswith("weight")
            parameter.normal_(float(is_scale), spread, generator=generator)
        for block in made.blocks:
            assert isinstance(block, VisionBlock)
            for norm, reader in (
                (block.attention_norm, block.qkv),
                (block.mlp_norm, block.up),
            ):
                norm.weight[5] *= 60
                reader.weight[:, 5] /= 60
    return made.requires_grad_(False).eval()


def pictures(num: int, seed: int = 6) -> Tensor:
    return torch.rand(num, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def made_int8(network: VisionTransformer) -> Quantised:
    seen = pictures(6, seed=9)
    return quantise(network, lambda: [network(seen)])


@DTYPES
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@torch.inference_mode()
def test_a_tower_in_8_bits_sees_nearly_the_same(dtype: torch.dtype, activation: str) -> None:
    """One channel sixty times as large as the others: without divisors the error is 25 %."""
    network = tower(activation).to(dtype)
    wanted = tower(activation)(pictures(4))
    done = made_int8(network)
    found = network(pictures(4))
    assert found.dtype == dtype
    error = float((found.float() - wanted).norm() / wanted.norm())
    assert 0.001 < error < 0.05
    assert done.num_matrices == 12
    assert done.num_weights == 3 * 64 * (3 * 64 + 64 + 2 * 160)
    assert done.error == pytest.approx(error, rel=1.0)
    assert all(
        parameter.numel() == 0
        for name, parameter in network.named_parameters()
        if "blocks" in name and "norm" not in name
    )


@torch.inference_mode()
def test_class_tokens_and_features_of_several_layers_are_kept() -> None:
    network = tower("quick_gelu", has_class_token=True, feature_layers=(2, 3))
    wanted = network(pictures(2))
    made_int8(network)
    found = network(pictures(2))
    assert found.shape == wanted.shape == (2, 17, 128)
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


@DTYPES
@torch.inference_mode()
def test_a_pictures_features_are_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    network = tower().to(dtype)
    made_int8(network)
    some = pictures(5)
    among = network(torch.cat((some, 1.0 - some, torch.ones(1, 3, 32, 32))))
    for place in range(5):
        alone = network(some[place : place + 1])[0]
        if dtype == torch.float32:
            # The patches' convolution adds up in another order, and a rounding may tip over.
            assert float((alone - among[place]).norm() / alone.norm()) < 1e-3
        else:
            assert torch.equal(alone, among[place])


def test_what_is_seen_of_a_batch_does_not_keep_the_batch() -> None:
    """A slice of a batch's rows would: of a whole tower that is gigabytes."""
    seen = Seen(torch.zeros(16))
    x = drawn(4096, 16)
    x[77, 3] = 50.0
    seen.add(x)
    assert sum(len(rows) for rows in seen.rows) <= 33
    assert sum(rows.untyped_storage().nbytes() for rows in seen.rows) <= 33 * 16 * 4
    assert any(bool((rows == 50.0).any()) for rows in seen.rows)  # the largest is among them
    assert seen.high == float(seen.largest.max()) == 50.0


@torch.inference_mode()
def test_a_step_is_chosen_by_what_it_costs_to_cut_the_largest_numbers() -> None:
    rows = drawn(64, 128)
    rows[3, 7] = 40.0
    grids = [Grid(40.0 * share / 127) for share in (*CLIPS, 0.1)]
    chosen = _best(grids, rows, torch.ones(16, 128))
    assert chosen in grids[:2]  # it is 40 times off if it is cut, so it must not be
    rows[3, 7] = 5.0
    assert _best(grids, rows, torch.ones(16, 128)) == grids[-1]


def test_a_network_without_a_vision_transformer_is_told() -> None:
    assert str(quantise(TinyModel(), list)) == (
        "int8: nothing, since this network has no vision transformer"
    )
