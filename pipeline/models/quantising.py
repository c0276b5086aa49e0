"""A vision tower in 8 bits: ranges from a few pictures, then every matrix on a grid of its own.

    attention_norm ─8─► qkv ─► attention ─8─► out ─► +
    mlp_norm ─8─► up, activation ─8─► down ─► +

Steps are fixed, so a picture's features depend on no other. `up` hands `down` 8-bit values, and
what the blocks add up is float32, which costs nothing here and loses nothing. A few channels of
trained networks are far larger than the others; they are divided by powers of two where they are
made (in the norms, and in the rows of qkv that make the values, since attention mixes tokens and no
channels), and the columns that read them are multiplied (SmoothQuant,
https://arxiv.org/abs/2211.10438). Steps are eighths of an octave, so that another machine's
rounding hardly ever moves them.

Two parts stay as they are, for what was measured on two cores with AMX. The projector: of the 1.9
ms of its product of 256 x 12,288 in bfloat16 0.8 would be saved, and rounding takes as long. The
decoder: its tokens differ too much for fixed steps; with a step for each row, and kernels in C
around oneDNN's 8-bit products, a decode step of SmolVLM-256M's shape took 24, 26, 39 and 55 ms at
1, 8, 32 and 64 rows, against 18, 20, 30 and 47 by our own bfloat16 products on tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeline.models.int8 import MOST, MOST_UNSIGNED, Grid, Int8Matrix
from pipeline.models.linear import Linear
from pipeline.models.vision import VisionBlock, VisionTransformer

QUICK_GELU = 1.702  # its x * sigmoid(1.702 x) is silu(1.702 x) / 1.702
NUM_ROWS = 32  # of each batch that are kept: the largest, and some of all
CLIPS = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)  # shares of the range that are tried


@dataclass(slots=True)
class Seen:
    """What a matrix's inputs were on the pictures: channels' largest numbers, and some rows."""

    largest: Tensor  # [C]
    low: float = 0.0
    high: float = 0.0
    rows: list[Tensor] = field(default_factory=list)  # each [at most NUM_ROWS, C]

    def add(self, x: Tensor) -> None:
        """Look at one batch of inputs `[..., C]`."""
        flat = x.detach().flatten(0, -2).float()
        sizes = flat.abs()
        self.largest = torch.maximum(self.largest, sizes.amax(dim=0))
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        # The rows with the largest numbers must be among those that a step is chosen by.
        peaks = sizes.amax(dim=1).topk(min(NUM_ROWS // 4, len(flat))).indices
        some = flat[:: -(-len(flat) // (NUM_ROWS - NUM_ROWS // 4))]
        self.rows += [flat[peaks], some.clone()]  # a slice would keep all of the batch


@dataclass(frozen=True, slots=True)
class Quantised:
    """How many matrices are in 8 bits now, and how far features moved on the pictures."""

    num_matrices: int
    num_weights: int
    error: float  # root mean square over that of the features

    def __str__(self) -> str:
        if not self.num_matrices:
            return "int8: nothing, since this network has no vision transformer"
        what = f"int8: {self.num_matrices} matrices ({self.num_weights / 1e6:.1f} million weights)"
        return f"{what}, image features off by {self.error:.1%}"


def vision_towers(network: nn.Module) -> list[VisionTransformer]:
    """Return the vision transformers of a network."""
    return [module for module in network.modules() if isinstance(module, VisionTransformer)]


@torch.inference_mode()
def quantise(network: nn.Module, features: Callable[[], Sequence[Tensor]]) -> Quantised:
    """Bring the blocks of vision transformers to 8 bits, in place.

    `features` runs the towers over pictures that stand for all others.
    """
    towers = vision_towers(network)
    blocks = [each for tower in towers for each in tower.modules() if isinstance(each, VisionBlock)]
    if not blocks:
        return Quantised(0, 0, 0.0)
    with watching(blocks) as seen:
        before = torch.cat([one.flatten() for one in features()]).float()
    sizes = [linear.weight.numel() for linear in seen]
    for block in blocks:
        _quantise(block, seen)
    for tower in towers:
        tower.is_wide = True
        tower.norm.float()
    after = torch.cat([one.flatten() for one in features()]).float()
    error = float((after - before).norm() / before.norm())
    return Quantised(len(sizes), sum(sizes), error)


@contextmanager
def watching(blocks: Sequence[VisionBlock]) -> Iterator[dict[Linear, Seen]]:
    """Note what the matrices of these blocks read."""
    seen = {
        linear: Seen(torch.zeros(linear.in_features))
        for block in blocks
        for linear in (block.qkv, block.out, block.up, block.down)
    }
    handles = [
        linear.register_forward_pre_hook(lambda _, inputs, note=note: note.add(inputs[0]))
        for linear, note in seen.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _quantise(block: VisionBlock, seen: dict[Linear, Seen]) -> None:
    """Bring one block's four matrices to 8 bits."""
    dtype, width = block.qkv.weight.dtype, block.out.in_features
    grid, divisors = _signed(block.out, seen[block.out])
    values = torch.ones(3 * width)
    values[2 * width :] /= divisors
    _behind_norm(block.attention_norm, block.qkv, seen[block.qkv], values, dtype)
    weight = block.out.weight * divisors
    block.out.become(Int8Matrix(weight, block.out.bias, grid, torch.float32))
    down, unit = _unsigned(block, seen[block.down])
    handed = Grid(down.step * unit, down.zero)
    times = torch.full((block.up.out_features,), unit)
    _behind_norm(block.mlp_norm, block.up, seen[block.up], times, dtype, handed)
    weight = block.down.weight
    block.down.become(Int8Matrix(weight, block.down.bias, down, torch.float32))


def _behind_norm(
    norm: nn.LayerNorm,
    linear: Linear,
    seen: Seen,
    times: Tensor,
    dtype: torch.dtype,
    output: Grid | None = None,
) -> None:
    """Bring a matrix behind a norm to 8 bits, its results multiplied by `times` `[O]`."""
    grid, divisors = _signed(linear, seen)
    for name in ("weight", "bias"):
        divided = norm.get_parameter(name).float() / divisors
        norm.register_parameter(name, nn.Parameter(divided, requires_grad=False))
    weight = linear.weight.float() * divisors * times[:, None]
    bias = None if linear.bias is None else linear.bias.float() * times
    linear.become(Int8Matrix(weight, bias, grid, dtype, output))


def _signed(linear: Linear, seen: Seen) -> tuple[Grid, Tensor]:
    """Choose a grid for a matrix's inputs, and powers of two `[C]` that divide them first."""
    floor = torch.finfo(torch.float32).tiny
    columns = linear.weight.float().abs().amax(dim=0).clamp_(min=floor)
    divisors = torch.exp2((seen.largest.clamp(min=floor) / columns).log2_().mul_(0.5).round_())
    divisors = torch.where(seen.largest > 0, divisors, torch.ones(()))
    rows = torch.cat(seen.rows) / divisors
    widest = float((seen.largest / divisors).max())
    weight = linear.weight.float() * divisors

    def grid(share: float) -> Grid:
        return Grid(coarse(widest * share / MOST))

    return _best([grid(share) for share in CLIPS], rows, weight), divisors


def _unsigned(block: VisionBlock, seen: Seen) -> tuple[Grid, float]:
    """Choose a grid for what follows the activation, and the unit that it is computed in."""
    low, high = seen.low, seen.high
    grids = []
    for share in CLIPS:
        step = coarse((high * share - low) / MOST_UNSIGNED)
        grids.append(Grid(step, min(MOST_UNSIGNED, round(-low / step))))
    best = _best(grids, torch.cat(seen.rows), block.down.weight.float())
    if block.activation != "quick_gelu":
        return best, 1.0
    block.activation = "silu"
    return best, QUICK_GELU


def _best(grids: Sequence[Grid], rows: Tensor, weight: Tensor) -> Grid:
    """Return the grid on which rows `[R, C]` times a weight `[O, C]` are off by least."""
    importance = weight.square().sum(dim=0)

    def error(grid: Grid) -> float:
        rounded = (grid.nearest(rows).float() - grid.zero) * grid.step
        return float(((rounded - rows).square() * importance).sum())

    return min(grids, key=error)


def coarse(step: float) -> float:
    """Round a step up to an eighth of an octave, which another machine finds too."""
    return float(2.0 ** (math.ceil(8 * math.log2(step)) / 8)) if step > 0 else 1.0
