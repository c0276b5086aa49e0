"""Products of 8-bit numbers: oneDNN's, by torch. Sums are whole numbers, so no neighbour shows.

    x / step + zero ─round─► uint8 ┐
                                   ├─► int32 sums ─► x step x row's scale + bias ─► activation
    weight / row's scale ──► int8  ┘                 ─► a wider dtype, or 8 bits again

A step is fixed when the network is laid out; one that followed the largest number of a batch would
let rows change each other. Inputs are unsigned: for signed ones oneDNN has fast kernels with AMX
only, and elsewhere takes a thousand times as long.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models.matrices import Matrix

MOST = 127  # of a weight's int8; -128 stays unused, so that both sides are alike
MOST_UNSIGNED = 255
MIDDLE = 128
# What oneDNN calls activations behind an 8-bit product. The exact gelu stands for the one by tanh:
# they differ by 0.0005 at most, a thirtieth of a step, and the kernel's tanh takes 0.5 ms of 2.0.
FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_pytorch_tanh": ("gelu", "none"),
    "gelu_new": ("gelu", "none"),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
}
ROWS_AT_ONCE = 4096  # of a weight: bounds the memory of loading
MAX_TIMES = 4  # as slow as plain products: only kernels made for no processor at all are


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers `step * (value - zero)` of values from 0 to 255."""

    step: float
    zero: int = MIDDLE

    def nearest(self, x: Tensor) -> Tensor:
        """Round numbers `[...]` to uint8; those beyond the ends become the ends."""
        return _fastest_rounding()(x.float().contiguous(), self)


def _round_in_three_passes(x: Tensor, grid: Grid) -> Tensor:
    return (x * (1 / grid.step)).add_(grid.zero).round_().clamp_(0, MOST_UNSIGNED).to(torch.uint8)


def _round_at_once(x: Tensor, grid: Grid) -> Tensor:
    """Let torch's quantised tensors do it, and take their bytes: five times as fast."""
    rounded = torch.quantize_per_tensor(x, grid.step, grid.zero, torch.quint8)
    place = (rounded.untyped_storage(), 0, rounded.size(), rounded.stride())
    return torch.empty(0, dtype=torch.uint8).set_(*place)


@cache
def _fastest_rounding() -> Callable[[Tensor, Grid], Tensor]:
    """Choose one, where it is first needed: quantised tensors are announced to leave torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says so once a process
            found = _round_at_once(torch.tensor([-9.0, 0.7, 1.4, 999.0]), Grid(1.0, 3))
    except (AttributeError, RuntimeError):
        return _round_in_three_passes
    return _round_at_once if found.tolist() == [0, 4, 4, 255] else _round_in_three_passes


class Int8Matrix(Matrix):
    """A weight `[O, C]` in 8 bits with a scale a row, and the bias; the plain one isn't kept."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        grid: Grid,
        dtype: torch.dtype,
        output: Grid | None = None,
    ) -> None:
        """Round a weight to 8 bits; results are of `dtype`, or values on `output`."""
        scales, values = rounded_rows(weight)
        self._grid, self._output = grid, output
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().float()
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `[..., C]`, numbers or values on the grid."""
        return self._activated(x, "none")

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Multiply as `__call__` does, and apply one of `FUSED`."""
        return self._activated(x, *FUSED[activation])

    def _activated(self, x: Tensor, name: str, kind: str = "") -> Tensor:
        output = self._output
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            *self._product(x),
            self._bias,
            1.0 if output is None else output.step,
            0 if output is None else output.zero,
            self._dtype if output is None else torch.uint8,
            name,
            [],
            kind,
        )
        return result

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Multiply as `__call__` does, then add another tensor, rounding once."""
        result: Tensor = torch.ops.onednn.qlinear_pointwise.binary(
            *self._product(x),
            other.contiguous(),  # oneDNN has no kernel for any other order, and takes seconds
            self._bias,
            1.0,
            0,
            self._dtype,
            1.0,
            0,
            "add",
            1.0,
            "none",
            [],
            "",
        )
        return result

    def _product(self, x: Tensor) -> tuple[Tensor, float, int, Tensor, Tensor, Tensor]:
        if x.is_floating_point():
            x = self._grid.nearest(x)
        return x, self._grid.step, self._grid.zero, self._packed, self._scales, self._zeros


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scale a row, float32 `[O]`, and the weight `[O, C]` rounded to int8."""
    scales = torch.empty(len(weight))
    values = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        wide = weight[rows].detach().float()
        scales[rows] = wide.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / MOST
        values[rows] = (wide / scales[rows, None]).round_().clamp_(-MOST, MOST)
    return scales, values


def what_is_missing(dtype: torch.dtype) -> str | None:
    """Try 8-bit products with results of `dtype`; say in a few words what is wrong with them."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return f"torch {torch.__version__} has no 8-bit products (onednn.qlinear_pointwise)"
    size = 256
    weight = torch.eye(size) + 1.0
    # The largest values: kernels that add up pairs in 16 bits would show.
    x = torch.full((size, size), float(MOST_UNSIGNED))
    try:
        matrix = Int8Matrix(weight, None, Grid(1.0, zero=0), dtype)
        with torch.inference_mode():
            found = matrix(x.to(torch.uint8)).float()
            seconds = _seconds(lambda: matrix(x.to(torch.uint8)))
            plain = _seconds(lambda: F.linear(x.to(dtype), weight.to(dtype)))
    except RuntimeError as error:
        return f"torch's 8-bit products do not run here ({str(error).splitlines()[0]})"
    off = float((found / (MOST_UNSIGNED * (size + 1)) - 1).abs().max())
    if off > 0.02:
        return f"this processor's 8-bit products are off by {off:.0%}"
    if seconds > MAX_TIMES * plain:
        name = str(dtype).removeprefix("torch.")
        return f"this processor's 8-bit products take {seconds / plain:.0f} times those of {name}"
    return None


def _seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
