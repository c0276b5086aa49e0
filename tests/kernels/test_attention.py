"""Attention on tiles computes what torch's does, whatever lies beside, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import attention
from pipeline.kernels.attention import MAX_HEAD_DIM, attend_to_all
from pipeline.models import vision
from pipeline.models.linear import lay_out
from pipeline.models.vision import VisionSpec, VisionTransformer

HAS_TILES = attention.found() is not None
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="no compiler, or a processor without tiles")


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def drawn(
    num_images: int, num_tokens: int, num_heads: int, head_dim: int, spread: float = 1.0
) -> Tensor:
    """Return queries, keys and values `[I, P, 3, H, D]`."""
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    shape = (num_images, num_tokens, 3, num_heads, head_dim)
    return (spread * torch.randn(shape, generator=generator)).bfloat16()


def some_seen(num_images: int, num_tokens: int) -> Tensor:
    """Return a mask `[I, 1, 1, P]` that leaves three of four tokens, and another each image."""
    mask = torch.rand(
        (num_images, 1, 1, num_tokens), generator=torch.Generator().manual_seed(1)
    ).gt(0.25)
    mask[..., 0] = True
    return mask


def torchs(heads: Tensor, mask: Tensor | None = None) -> Tensor:
    queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2)


def fused(heads: Tensor, mask: Tensor | None = None) -> Tensor:
    mixed = attend_to_all(heads, mask)
    assert mixed is not None
    return mixed


@needs_tiles
@pytest.mark.parametrize("is_masked", [False, True], ids=["all seen", "masked"])
@pytest.mark.parametrize(
    ("num_images", "num_tokens", "num_heads", "head_dim", "spread"),
    [
        (1, 1, 1, 64, 1),
        (2, 16, 3, 16, 1),
        (3, 33, 2, 64, 3),
        (1, 65, 2, 7, 2),
        (2, 96, 1, 65, 1),
        (2, 250, 2, 72, 2),
        (1, 257, 2, MAX_HEAD_DIM, 1),
        (1, 1024, 3, 64, 3),
        (1, 200, 2, 64, 20),  # weights of almost 1, and of less than any normal number
    ],
)
def test_the_error_is_that_of_torch(
    num_images: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    spread: float,
    is_masked: bool,
) -> None:
    heads = drawn(num_images, num_tokens, num_heads, head_dim, spread)
    mask = some_seen(num_images, num_tokens) if is_masked else None
    exact = torchs(heads.double(), mask)
    errors = (fused(heads, mask) - exact).abs()
    torchs_errors = (torchs(heads, mask) - exact).abs()
    assert errors.square().mean().sqrt() <= 1.05 * torchs_errors.square().mean().sqrt()
    assert errors.max() <= 1.5 * torchs_errors.max()


@needs_tiles
def test_an_image_has_the_same_bits_in_any_batch_and_with_any_mask_beside_it() -> None:
    heads, mask = drawn(5, 70, 3, 64), some_seen(5, 70)
    together = fused(heads, mask)
    for image in range(5):
        alone = slice(image, image + 1)
        assert torch.equal(fused(heads[alone], mask[alone]), together[alone])
    assert torch.equal(fused(heads)[:1], fused(heads[:1]))


@needs_tiles
@pytest.mark.usefixtures("one_thread")
def test_threads_and_the_parts_of_a_head_change_no_bit() -> None:
    for heads in (drawn(5, 70, 3, 64), drawn(1, 200, 1, 72)):
        alone = fused(heads)
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(fused(heads), alone)


@needs_tiles
def test_tokens_that_are_hidden_are_as_if_they_were_not_there() -> None:
    heads, mask = drawn(2, 150, 2, 64), some_seen(1, 150)
    left = mask.flatten()
    with_them = fused(heads, mask)[:, left]
    assert torch.equal(with_them, fused(heads[:, left].contiguous()))
    heads[:, ~left, 1:] = math.nan
    assert torch.equal(fused(heads, mask)[:, left], with_them)


@needs_tiles
def test_heads_are_read_where_they_lie() -> None:
    heads = drawn(2, 40, 4, 64)
    wide = torch.full((2, 41, 3, 6, 70), math.nan, dtype=torch.bfloat16)
    wide[:, 1:, :, 2:, 6:] = heads
    assert torch.equal(fused(wide[:, 1:, :, 2:, 6:]), fused(heads))


@needs_tiles
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_a_number_that_is_not_finite_reaches_the_results_of_its_head_alone(
    bad: float, which: int
) -> None:
    heads = drawn(2, 40, 2, 64)
    clean = fused(heads)
    heads[0, 3, which, 1, 5] = bad
    mixed = fused(heads)
    # Spelled out: torch's own attention lets an infinite score pass.
    queries, keys, values = heads.double().permute(2, 0, 3, 1, 4).unbind(0)
    expected = (queries @ keys.mT / 8).softmax(-1) @ values
    assert not mixed.isfinite().all()
    assert torch.equal(mixed.isfinite(), expected.transpose(1, 2).flatten(2).isfinite())
    untouched = [(1, slice(None), slice(None)), (0, slice(None), slice(0, 64))]
    assert all(torch.equal(mixed[place], clean[place]) for place in untouched)


@needs_tiles
def test_products_of_onednn_and_small_numbers_are_as_before() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).bfloat16()
    weight = torch.randn(80, 96, generator=generator).bfloat16()
    tiny = torch.full((1000,), 1e-39)
    before = F.linear(x, weight), tiny * 0.5
    for heads in (drawn(2, 100, 3, 64), drawn(2, 100, 3, 72)):
        fused(heads)
        assert torch.equal(F.linear(x, weight), before[0])
        # Not flushed to zero: the processor's modes are given back, in this thread and the others.
        assert torch.equal(tiny * 0.5, before[1])
        assert (before[1] > 0).all()


def test_what_the_kernel_cannot_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = drawn(1, 20, 2, 64)
    assert (attend_to_all(heads, None) is not None) == HAS_TILES
    assert attend_to_all(heads.float(), None) is None
    assert attend_to_all(heads.to("meta"), None) is None
    assert attend_to_all(heads.clone().requires_grad_(), None) is None
    assert attend_to_all(drawn(1, 20, 64, 2).transpose(3, 4), None) is None
    assert attend_to_all(drawn(1, 20, 2, MAX_HEAD_DIM + 1), None) is None
    monkeypatch.setattr(attention, "found", lambda: None)
    assert attend_to_all(heads, None) is None


@needs_tiles
@torch.inference_mode()
def test_a_tower_sees_the_same_with_the_kernel_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec = VisionSpec(128, 256, 3, 2, image_size=64, patch_size=8, spreads_positions=True)
    tower = VisionTransformer(spec).eval()
    pixels = torch.randn(2, 3, 64, 64)
    patch_mask = torch.ones(2, 8, 8, dtype=torch.bool)
    patch_mask[1, 5:] = False
    exact = tower.double()(pixels.double(), patch_mask)
    tower = tower.bfloat16()
    lay_out(tower)
    with_kernel = tower(pixels, patch_mask)
    monkeypatch.setattr(vision, "attend_to_all", lambda heads, mask: None)
    without = tower(pixels, patch_mask)
    assert not torch.equal(with_kernel, without)  # it was used
    seen = patch_mask.flatten(1)
    errors, torchs_errors = ((x - exact)[seen].square().mean() for x in (with_kernel, without))
    assert errors <= 1.1 * torchs_errors
