"""Matrix products with what follows them in the same pass, and weights laid out for them.

On a processor, torch's oneDNN kernels read a weight faster in their own blocked order, and apply
an activation or an addition while a result is still in cache. `lay_out` brings a network's
matrices in that order, once, and gives the plain ones back. A decoder's are packed for kernels of
our own where the processor has tiles: at the few rows of a decode step, they are read faster.
Elsewhere the same methods run as separate operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.linear import PackedMatrix, can_pack
from pipeline.kernels.pages import LargePages
from pipeline.models.int8 import Int8Matrix

_LAID_OUT = (torch.bfloat16, torch.float32)


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


class LaysOut(ABC):
    """A module with weights that `lay_out` brings in another order."""

    @abstractmethod
    def lay_out(self) -> None:
        """Bring the weights in the order that the processor's kernels read."""


class Linear(nn.Linear, LaysOut):
    """A matrix and bias; inputs are `[..., inputs]`, results `[..., outputs]`."""

    _blocked: Tensor | None = None
    _packed: PackedMatrix | None = None
    _int8: Int8Matrix | None = None

    def lay_out(self) -> None:
        """Keep the blocked weight alone: `weight` is empty from now on."""
        if can_lay_out(self.weight):
            self._blocked = blocked(self.weight)
            self.weight = _emptied(self.weight)

    def pack(self, room: LargePages) -> None:
        """Keep a packed weight alone, which is fast at few rows, where there is a kernel."""
        if can_pack(self.weight):
            self._packed = PackedMatrix(self.weight, room)
            self.weight = _emptied(self.weight)

    def become_int8(self, matrix: Int8Matrix) -> None:
        """Multiply by this matrix, whose bias counts too: `weight` is empty from now on."""
        self._int8 = matrix
        self.register_parameter("bias", None)
        self.weight = _emptied(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `W x + b`."""
        if self._int8 is not None:
            return self._int8(x)
        if self._packed is not None:
            return self._packed(x, self.bias)
        if self._blocked is None:
            return super().forward(x)
        return blocked_linear(x, self._blocked, self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Return `activation(W x + b)`; names are those of `ACTIVATIONS`."""
        if self._int8 is not None:
            return self._int8(x, activation)
        if self._blocked is None or activation not in _FUSED:
            return ACTIVATIONS[activation](self(x))
        return blocked_linear(x, self._blocked, self.bias, *_FUSED[activation])

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Return `other + W x + b`."""
        if self._int8 is not None:
            return self._int8.added(x, other)
        if self._packed is not None:
            return self._packed(x, self.bias, other)
        if self._blocked is None:
            summed: Tensor = other + self(x)
            return summed
        return _blocked_pair(x, self._blocked, self.bias, other, "add")


class GatedLinear(nn.Linear, LaysOut):
    """SwiGLU's two matrices as one, the gate's rows first (https://arxiv.org/abs/2002.05202)."""

    _gate: Tensor | None = None
    _up: Tensor | None = None
    _packed: PackedMatrix | None = None

    def __init__(self, inputs: int, width: int) -> None:
        """Give a result of `width`, from twice as many rows without a bias."""
        super().__init__(inputs, 2 * width, bias=False)

    def lay_out(self) -> None:
        """Keep the two blocked weights alone: `weight` is empty from now on."""
        if can_lay_out(self.weight):
            gate, up = self.weight.detach().chunk(2)
            self._gate, self._up = blocked(gate), blocked(up)
            self.weight = _emptied(self.weight)

    def pack(self, room: LargePages) -> None:
        """Keep a packed weight alone, as `Linear` does."""
        if can_pack(self.weight):
            self._packed = PackedMatrix(self.weight, room, is_gated=True)
            self.weight = _emptied(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `silu(gate x) * (up x)`."""
        if self._packed is not None:
            return self._packed(x)
        if self._gate is None or self._up is None:
            gate, up = F.linear(x, self.weight).chunk(2, dim=-1)
            gated: Tensor = F.silu(gate) * up
            return gated
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


def _emptied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.new_empty(0), requires_grad=False)


def can_lay_out(weight: Tensor) -> bool:
    """True where torch has blocked products for a weight's device and dtype."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _LAID_OUT
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def lay_out(network: nn.Module) -> None:
    """Lay out a network's weights where that helps; a second call changes nothing.

    The network can only be used in inference afterwards: its plain weights are gone.
    """
    for module in network.modules():
        if isinstance(module, LaysOut):
            module.lay_out()
