"""Products with packed weights: right, rounded once, and no row sees its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.stopping import StopRules
from pipeline.kernels import linear
from pipeline.kernels.linear import PackedMatrix, can_pack
from pipeline.kernels.pages import LARGE_PAGE, LargePages
from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.linear import GatedLinear, Linear, lay_out
from pipeline.models.matrices import blocked, blocked_linear
from pipeline.models.tiny import TinyModel
from tests.kernels.running import run_prompts

NEEDS_TILES = pytest.mark.skipif(
    not can_pack(torch.ones(1, 1, dtype=torch.bfloat16)),
    reason="this processor has no matrix tiles (AMX), or the kernels were not built",
)
# Rows, outputs, inputs: whole tiles and panels, and everything that is not.
SIZES = [
    (1, 1, 1),
    (1, 32, 32),
    (3, 20, 70),
    (15, 100, 96),
    (16, 48, 64),
    (17, 96, 33),
    (40, 66, 130),
    (64, 576, 576),
    (333, 130, 96),
    (700, 64, 1536),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: Tensor, *, is_gated: bool = False) -> PackedMatrix:
    return PackedMatrix(weight, LargePages(1 << 16), is_gated=is_gated)


def is_rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Half a unit of bfloat16's last place, and what a sum in float32 may be off."""
    assert found.dtype == torch.bfloat16
    off = (found.double() - exact).abs()
    return bool((off <= exact.abs() * 2**-8 * (1 + 2**-6) + 1e-4).all())


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@NEEDS_TILES
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SIZES)
def test_a_product_is_that_of_float64_rounded(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    x, weight = drawn(num_rows, num_inputs), drawn(num_outputs, num_inputs, seed=1)
    weight /= num_inputs**0.5
    bias, other = drawn(num_outputs, seed=2), drawn(num_rows, num_outputs, seed=3)
    matrix = packed(weight)
    exact = x.double() @ weight.double().T
    assert is_rounded_once(matrix(x), exact)
    assert is_rounded_once(matrix(x, bias), exact + bias.double())
    assert is_rounded_once(matrix(x, None, other), exact + other.double())
    assert is_rounded_once(matrix(x, bias, other), exact + bias.double() + other.double())


@NEEDS_TILES
@pytest.mark.parametrize(("num_rows", "width", "num_inputs"), SIZES)
def test_a_gated_product_is_silu_of_its_first_half_times_the_second(
    num_rows: int, width: int, num_inputs: int
) -> None:
    x, weight = drawn(num_rows, num_inputs), drawn(2 * width, num_inputs, seed=1)
    weight /= num_inputs**0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert is_rounded_once(packed(weight, is_gated=True)(x), F.silu(gate) * up)


@NEEDS_TILES
def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gates = torch.tensor([-3e38, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 3e38])
    x = gates.bfloat16()[:, None]
    found = packed(torch.ones(2, 1, dtype=torch.bfloat16), is_gated=True)(x)
    wide = x.double()
    expected = (F.silu(wide) * wide).bfloat16()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-35)


@NEEDS_TILES
def test_leading_dimensions_and_views_are_kept_apart() -> None:
    matrix, weight = packed(drawn(48, 64, seed=1)), drawn(48, 64, seed=1)
    x = drawn(5, 7, 3, 64)
    exact = x.double() @ weight.double().T
    assert matrix(x).shape == (5, 7, 3, 48)
    assert is_rounded_once(matrix(x), exact)
    assert torch.equal(matrix(x.transpose(0, 1)), matrix(x).transpose(0, 1))
    assert torch.equal(matrix(x[:, :, 1]), matrix(x)[:, :, 1])
    assert torch.equal(matrix(x, other=drawn(48)), matrix(x, other=drawn(48).expand(5, 7, 3, 48)))
    assert matrix(x[:0]).shape == (0, 7, 3, 48)


@NEEDS_TILES
@pytest.mark.parametrize("num_inputs", [96, 1536, 50])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_does_not_depend_on_its_neighbours_their_number_or_threads(
    num_inputs: int, is_gated: bool
) -> None:
    matrix = packed(drawn(960, num_inputs, seed=1), is_gated=is_gated)
    x = drawn(700, num_inputs)
    other = None if is_gated else drawn(700, 960, seed=2)
    together = matrix(x, other=other)
    for num_threads in (1, 2, 3):
        with threads(num_threads):
            assert torch.equal(matrix(x, other=other), together)
            for rows in (slice(0, 1), slice(699, 700), slice(3, 20), slice(100, 164), slice(0, 33)):
                some = matrix(x[rows], other=None if other is None else other[rows])
                assert torch.equal(some, together[rows])


@NEEDS_TILES
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    matrix = packed(drawn(64, 64, seed=1))
    x = drawn(20, 64)
    clean = matrix(x)
    x[3, 5], x[17, 0] = float("nan"), float("inf")
    found = matrix(x)
    assert found[3].isnan().all()
    assert not found[17].isfinite().any()
    rest = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(found[rest], clean[rest])


@NEEDS_TILES
def test_torchs_own_tiles_are_as_before_between_ours() -> None:
    weight, x = drawn(512, 512, seed=1), drawn(200, 512)
    laid_out, matrix = blocked(weight), packed(weight)
    before = blocked_linear(x, laid_out, None)
    ours = matrix(x[:5])
    for num_rows in (1, 5, 16, 200):
        assert torch.equal(matrix(x[:num_rows])[:1], ours[:1])
        assert torch.equal(blocked_linear(x, laid_out, None), before)
        assert torch.equal(x @ weight.T, x @ weight.T)
    assert torch.equal(matrix(x[:5]), ours)


def test_pieces_are_a_range_of_panels_a_thread_and_rows_that_fit_a_cache() -> None:
    assert linear._cut(1200, 48, 18, 2) == (2, 256, 24)
    assert linear._cut(1200, 18, 48, 2) == (2, 256, 9)
    assert linear._cut(1200, 18, 256, 2) == (2, 32, 9)


def test_more_threads_than_panels_share_the_rows() -> None:
    assert linear._cut(256, 2, 18, 8) == (8, 64, 1)
    assert linear._cut(16, 2, 180, 8) == (8, 32, 1)


def test_little_work_is_done_by_few_threads() -> None:
    assert linear._cut(1, 2, 2, 8)[0] == 1
    assert linear._cut(64, 30, 18, 8)[0] == 8


def test_what_the_kernel_cannot_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(8, 8)
    assert not can_pack(weight.float())
    assert not can_pack(weight.double())
    assert not can_pack(weight[:0])
    assert not can_pack(weight.to("meta"))
    monkeypatch.setattr(linear, "_part", lambda: None)
    assert not can_pack(weight)
    layer, gated = Linear(8, 8).bfloat16(), GatedLinear(8, 8).bfloat16()
    layer.pack(LargePages())
    gated.pack(LargePages())
    assert layer.weight.numel() == 64
    assert gated.weight.numel() == 128


def test_tensors_in_large_pages_stand_apart_and_are_kept_alive() -> None:
    room = LargePages(chunk_size=1 << 20)
    shapes = [(3,), (5, 7), (400, 1000), (1,), (2, 300_000)]
    tensors = [room.empty(shape, torch.bfloat16).fill_(place) for place, shape in enumerate(shapes)]
    del room
    for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == place).all()
    large = LargePages(chunk_size=1 << 20).empty((5 << 20,), torch.uint8)
    assert large.data_ptr() % LARGE_PAGE == 0


SPEC = DecoderSpec(2, 6, 2, 16, 96, 128, 200)


def decoder(spec: DecoderSpec) -> LlamaDecoder:
    network = LlamaDecoder(spec)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
    return network.bfloat16().requires_grad_(False).eval()


@NEEDS_TILES
@pytest.mark.parametrize("is_head_tied", [True, False])
@torch.inference_mode()
def test_a_packed_decoder_is_as_near_to_float64_as_a_plain_one(is_head_tied: bool) -> None:
    spec = replace(SPEC, is_head_tied=is_head_tied)
    plain, ours = decoder(spec), decoder(spec)
    lay_out(ours)
    lay_out(ours)
    weights = {name for name, p in ours.named_parameters() if p.dim() == 2}
    assert weights == {"embedding.weight"}
    wide = decoder(spec).double()
    ids = torch.randint(200, (4, 50), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(50).expand(4, 50)
    mask = torch.ones(50, 50, dtype=torch.bool).tril().expand(4, 1, 50, 50)

    def logits(network: LlamaDecoder) -> Tensor:
        return network.logits(network(network.embed(ids), positions, mask)).double()

    exact = logits(wide)
    off, off_of_plain = ((logits(each) - exact).square().mean().sqrt() for each in (ours, plain))
    assert off < 1.05 * off_of_plain


def captions(dtype: torch.dtype, *, is_packed: bool) -> list[list[int]]:
    """Run 24 prompts of several lengths through 8 slots."""
    model = TinyModel().to(dtype).eval()
    if is_packed:
        lay_out(model)
    rules = StopRules(frozenset(), max_new_tokens=16)
    ended = run_prompts(model, dtype, SamplingSettings(), rules, 24)
    return [list(sequence.token_ids) for sequence in ended]


def num_agreeing(found: list[list[int]], expected: list[list[int]]) -> int:
    """Count tokens before the first that differs: what follows it is another caption."""
    return sum(
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(some, right, strict=True))))
        for some, right in zip(found, expected, strict=True)
    )


@NEEDS_TILES
def test_captions_with_packed_weights_are_as_near_to_float32s_as_with_plain_ones() -> None:
    exact = captions(torch.float32, is_packed=False)
    ours = num_agreeing(captions(torch.bfloat16, is_packed=True), exact)
    plain = num_agreeing(captions(torch.bfloat16, is_packed=False), exact)
    assert ours >= 0.9 * plain
    assert ours >= 0.7 * 24 * 16
