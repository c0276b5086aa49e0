"""A vision tower's activations and norms in bfloat16, each in one pass, on processors with AMX.

oneDNN computes a tanh behind a product for as long as the product takes; half of that is saved by
a pass of its own, which rounds once more, as networks were trained. Results are within a tenth of
a rounding step of the formulas. Elements and rows are computed by themselves.
"""

from __future__ import annotations

import math
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipeline.kernels.library import Part, part_of_tiles, run

# Their numbers grow with every change of a struct of tower.c.
_ENTRIES = ("captionjob_activation_1", "captionjob_layer_norm_1")
NUMBERS_TOGETHER = 64  # a norm's width must be a multiple
# Less than this is done before another thread has woken up.
NUMBERS_OF_THREAD = 4096
# x / (1 + 2^(x (linear + cubic x^2))): a tanh is a logistic function, and e^y is 2^(y log2(e)).
_TANH = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
ACTIVATIONS = {
    "gelu_pytorch_tanh": (_TANH, 0.044715 * _TANH),
    "gelu_new": (_TANH, 0.044715 * _TANH),
    "quick_gelu": (-1.702 * math.log2(math.e), 0.0),
}


class _Activation(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_numbers", c_int64),
        ("linear", c_double),
        ("cubic", c_double),
        ("x", c_void_p),
    )


class _LayerNorm(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("eps", c_double),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("normed", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class TowerKernels:
    """The two parts."""

    activation: Part
    layer_norm: Part


@cache
def found() -> TowerKernels | None:
    """Return the kernels; None where they were not built, or the processor has no tiles."""
    activation, norm = (part_of_tiles("_tower", name) for name in _ENTRIES)
    return TowerKernels(activation, norm) if activation and norm else None


def can_activate(x: Tensor, activation: str) -> bool:
    """True where `activate_` can do it to what a product gives for x."""
    return activation in ACTIVATIONS and _kernels_for(x) is not None


def activate_(x: Tensor, activation: str) -> Tensor:
    """Apply an activation to every number of x, in place; `can_activate` must be true."""
    kernels = found()
    assert kernels is not None
    assert x.is_contiguous()
    linear, cubic = ACTIVATIONS[activation]
    job = _Activation(0, x.numel(), linear, cubic, x.data_ptr())
    run(kernels.activation, job, _num_threads(x))
    return x


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` of `[..., C]`."""
    kernels = _kernels_for(x)
    weight, bias, width = norm.weight, norm.bias, x.shape[-1]
    is_plain = x.is_contiguous() and weight.dtype == bias.dtype == x.dtype
    if (
        kernels is None
        or not is_plain
        or width % NUMBERS_TOGETHER
        or norm.normalized_shape != (width,)
    ):
        normed: Tensor = norm(x)
        return normed
    normed = torch.empty_like(x)
    job = _LayerNorm(
        0,
        x.numel() // width,
        width,
        norm.eps,
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        normed.data_ptr(),
    )
    run(kernels.layer_norm, job, _num_threads(x))
    return normed


def _kernels_for(x: Tensor) -> TowerKernels | None:
    is_here = x.device.type == "cpu" and not (x.requires_grad or torch.is_grad_enabled())
    return found() if is_here and x.dtype == torch.bfloat16 else None


def _num_threads(x: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + x.numel() // NUMBERS_OF_THREAD)
