"""A weight matrix in a form that some kernels read fast, and what follows its products.

    Matrix ─► BlockedMatrix   oneDNN's order, with an activation or addition in the same pass
           ─► TiledMatrix     packed for products of our own (AMX), which few rows are enough for
           ─► Int8Matrix      8 bits (`pipeline.models.int8`)

Each holds its bias, and the plain weight is not kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.linear import PackedMatrix
from pipeline.kernels.pages import LargePages
from pipeline.kernels.tower import activate_, can_activate

_BLOCKED = (torch.bfloat16, torch.float32)


def quick_gelu(x: Tensor) -> Tensor:
    """Approximate GELU by `x * sigmoid(1.702 x)` (https://arxiv.org/abs/1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """Approximate GELU by a tanh of a cubic (https://arxiv.org/abs/1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_new": tanh_gelu,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "relu": F.relu,
}
# What oneDNN calls them; an activation that is not here runs by itself.
_FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu_new": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
}


class Matrix(ABC):
    """A weight `[O, C]` and bias; inputs are `[..., C]`, results `[..., O]`."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return `W x + b`."""

    @abstractmethod
    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Return `other + W x + b`."""

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Return `activation(W x + b)`; names are those of `ACTIVATIONS`."""
        return ACTIVATIONS[activation](self(x))


class BlockedMatrix(Matrix):
    """A weight in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = blocked(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `W x + b`."""
        return blocked_linear(x, self._weight, self._bias)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Return `other + W x + b`, rounded once."""
        return _blocked_pair(x, self._weight, self._bias, other, "add")

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Activate in the same pass, or in one of our own where that is faster."""
        if can_activate(x, activation):
            return activate_(self(x), activation)
        if activation not in _FUSED:
            return super().activated(x, activation)
        return blocked_linear(x, self._weight, self._bias, *_FUSED[activation])


class TiledMatrix(Matrix):
    """A weight that is packed for matrix tiles; `can_pack` must be true of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, room: LargePages) -> None:
        self._packed = PackedMatrix(weight, room)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `W x + b`."""
        return self._packed(x, self._bias)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Return `other + W x + b`, rounded once."""
        return self._packed(x, self._bias, other)


class BlockedGate:
    """SwiGLU's two matrices in oneDNN's own order."""

    def __init__(self, weight: Tensor) -> None:
        """Take `[2 O, C]`, the gate's rows first."""
        self._gate, self._up = (blocked(half) for half in weight.chunk(2))

    def __call__(self, x: Tensor) -> Tensor:
        """Return `silu(gate x) * (up x)`."""
        gate = blocked_linear(x, self._gate, None, *_FUSED["silu"])
        return _blocked_pair(x, self._up, None, gate, "mul")


def blocked(weight: Tensor) -> Tensor:
    """Return a weight `[outputs, inputs]` in the order that `blocked_linear` wants."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return reordered


def blocked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", kind: str = ""
) -> Tensor:
    """Multiply by a blocked weight, and apply one of oneDNN's activations."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], kind)
    return result


def _blocked_pair(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor, operation: str
) -> Tensor:
    """Multiply by a blocked weight, then `add` or `mul` another tensor, rounding once."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)
    return result


def can_block(weight: Tensor) -> bool:
    """True where torch has blocked products for a weight's device and dtype."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _BLOCKED
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
