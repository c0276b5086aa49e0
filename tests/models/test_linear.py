"""Blocked weights: the same products, the plain weights given back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.linear import GatedLinear, Linear, lay_out
from pipeline.models.matrices import ACTIVATIONS, can_block

pytestmark = pytest.mark.skipif(
    not can_block(torch.ones(1, 1)), reason="this torch has no blocked products"
)


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return module.to(dtype).requires_grad_(False)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@torch.inference_mode()
def test_a_blocked_matrix_multiplies_activates_and_adds_as_the_plain_one(
    dtype: torch.dtype, activation: str
) -> None:
    linear = filled(Linear(24, 40), dtype)
    assert isinstance(linear, Linear)
    x, other = drawn(3, 5, 24, dtype=dtype), drawn(3, 5, 40, dtype=dtype)
    exact = linear.double()
    wide = x.double()
    wanted = exact(wide), exact.activated(wide, activation), exact.added(wide, other.double())
    lay_out(linear.to(dtype))
    found = linear(x), linear.activated(x, activation), linear.added(x, other)
    for one, right in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        close(one, right.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_blocked_gate_is_silu_of_its_first_half_times_the_second(dtype: torch.dtype) -> None:
    gated = filled(GatedLinear(24, 40), dtype)
    x = drawn(7, 24, dtype=dtype)
    gate, up = nn.functional.linear(x.double(), gated.weight.double()).chunk(2, dim=-1)
    lay_out(gated)
    close(gated(x), (nn.functional.silu(gate) * up).to(dtype))


@torch.inference_mode()
def test_the_plain_weights_are_given_back_but_for_a_table_that_is_looked_up() -> None:
    spec = DecoderSpec(2, 4, 2, 8, 32, 48, 64)
    decoder = filled(LlamaDecoder(spec))
    assert isinstance(decoder, LlamaDecoder)
    hidden = drawn(3, 32)
    wanted = decoder.logits(hidden)
    lay_out(decoder)
    lay_out(decoder)
    assert {name for name, p in decoder.named_parameters() if p.dim() == 2} == {"embedding.weight"}
    close(decoder.logits(hidden), wanted)


@torch.inference_mode()
def test_float64_stays_as_it_is() -> None:
    linear = filled(Linear(8, 8), torch.float64)
    before = linear.weight.clone()
    lay_out(linear)
    assert torch.equal(linear.weight, before)
