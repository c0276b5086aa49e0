"""Rows around a product of 8-bit numbers, in one pass each: rounded before it, scaled behind it.

Each row has a step of its own, so that none depends on its neighbours. torch's operations compute
the same numbers where the compiled kernels are not; they take three to ten times as long.
"""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import library
from pipeline.kernels.decode import NUMBERS_OF_THREAD
from pipeline.kernels.library import Library

MIDDLE = 128  # the value that stands for 0
MOST = 127


class _Rounding(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("rows_of_piece", c_int64),
        ("x", c_void_p),
        ("values", c_void_p),
        ("steps", c_void_p),
    )


class _Scaling(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("rows_of_piece", c_int64),
        ("steps", c_void_p),
        ("other", c_void_p),
        ("y", c_void_p),
    )


class _Gating(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("rows_of_piece", c_int64),
        ("steps", c_void_p),
        ("both", c_void_p),
        ("gated", c_void_p),
    )


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[..., C]` to uint8 around `MIDDLE`; returns them and a step a row, float32 `[..., 1]`.

    A row's step is its largest number over `MOST`; of a row that is not finite it isn't either.
    """
    x = x.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    kernels = _kernels_for(x)
    if kernels is None:
        wide = x.float()
        largest = wide.abs().amax(dim=-1, keepdim=True)
        inverse = torch.where(largest == 0, 0.0, MOST / largest)
        values = (wide * inverse).round_().nan_to_num_().add_(MIDDLE)
        return values.to(torch.uint8), largest / MOST
    values = torch.empty(x.shape, dtype=torch.uint8)
    steps = torch.empty(*x.shape[:-1], 1)
    job = _Rounding(
        next=0,
        num_rows=num_rows,
        width=width,
        rows_of_piece=max(1, NUMBERS_OF_THREAD // width),
        x=x.data_ptr(),
        values=values.data_ptr(),
        steps=steps.data_ptr(),
    )
    kernels.run(kernels.round_rows[x.dtype], job, _num_threads(x.numel()))
    return values, steps


def scale_rows_(y: Tensor, steps: Tensor, other: Tensor | None = None) -> Tensor:
    """Multiply the rows of `[..., O]` by their steps and add another tensor, in place."""
    kernels = _kernels_for(y)
    if kernels is None:
        scaled = y.float() * steps
        return y.copy_(scaled if other is None else scaled + other.float())
    if other is not None:
        other = other.contiguous()
    width = y.shape[-1]
    job = _Scaling(
        next=0,
        num_rows=y.numel() // width,
        width=width,
        rows_of_piece=max(1, NUMBERS_OF_THREAD // width),
        steps=steps.data_ptr(),
        other=None if other is None else other.data_ptr(),
        y=y.data_ptr(),
    )
    kernels.run(kernels.scale_rows[y.dtype], job, _num_threads(y.numel()))
    return y


def gate_rows(both: Tensor, steps: Tensor) -> Tensor:
    """Return `silu(gate) * up` of rows `[..., 2 W]`, gates first, multiplied by their steps."""
    width = both.shape[-1] // 2
    kernels = _kernels_for(both)
    if kernels is None or width < kernels.lanes:
        gate, up = (both.float() * steps).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(both.dtype)
    gated = torch.empty(*both.shape[:-1], width, dtype=both.dtype)
    job = _Gating(
        next=0,
        num_rows=gated.numel() // width,
        width=width,
        rows_of_piece=max(1, NUMBERS_OF_THREAD // width),
        steps=steps.data_ptr(),
        both=both.data_ptr(),
        gated=gated.data_ptr(),
    )
    kernels.run(kernels.gate_rows[both.dtype], job, _num_threads(both.numel()))
    return gated


def _num_threads(num_numbers: int) -> int:
    return min(torch.get_num_threads(), 1 + num_numbers // NUMBERS_OF_THREAD)


def _kernels_for(x: Tensor) -> Library | None:
    kernels = library.found()
    is_here = x.device.type == "cpu" and x.is_contiguous() and not x.requires_grad
    return kernels if kernels and is_here and x.dtype in kernels.round_rows else None
