"""Matrix products with what follows them, on weights laid out for the processor.

`lay_out` brings a network's matrices in the form that its kernels read fastest, once, and gives
the plain ones back: a decoder's are packed for tiles where the processor has them, all others are
brought in oneDNN's order (`pipeline.models.matrices`). Elsewhere the same methods run as separate
operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.linear import PackedMatrix, can_pack
from pipeline.kernels.pages import LargePages
from pipeline.models.matrices import (
    ACTIVATIONS,
    BlockedGate,
    BlockedMatrix,
    Matrix,
    TiledMatrix,
    can_block,
)


class LaysOut(ABC):
    """A module with weights that `lay_out` brings in another form."""

    @abstractmethod
    def lay_out(self) -> None:
        """Bring the weights in the form that the processor's kernels read."""


class Linear(nn.Linear, LaysOut):
    """A matrix and bias; inputs are `[..., inputs]`, results `[..., outputs]`."""

    _matrix: Matrix | None = None

    def become(self, matrix: Matrix) -> None:
        """Multiply by this matrix from now on, whose bias counts, too: `weight` is empty."""
        self._matrix = matrix
        self.weight = _emptied(self.weight)
        self.register_parameter("bias", None)

    def lay_out(self) -> None:
        """Become a matrix in oneDNN's order, where torch has products for it."""
        if can_block(self.weight):
            self.become(BlockedMatrix(self.weight, self.bias))

    def pack(self, room: LargePages) -> None:
        """Become a matrix that is fast at few rows, where there is a kernel."""
        if can_pack(self.weight):
            self.become(TiledMatrix(self.weight, self.bias, room))

    def forward(self, x: Tensor) -> Tensor:
        """Return `W x + b`."""
        return super().forward(x) if self._matrix is None else self._matrix(x)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Return `activation(W x + b)`; names are those of `ACTIVATIONS`."""
        if self._matrix is None:
            return ACTIVATIONS[activation](self(x))
        return self._matrix.activated(x, activation)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Return `other + W x + b`."""
        if self._matrix is None:
            summed: Tensor = other + self(x)
            return summed
        return self._matrix.added(x, other)


class GatedLinear(nn.Linear, LaysOut):
    """SwiGLU's two matrices as one, the gate's rows first (https://arxiv.org/abs/2002.05202)."""

    _gate: Callable[[Tensor], Tensor] | None = None

    def __init__(self, inputs: int, width: int) -> None:
        """Give a result of `width`, from twice as many rows without a bias."""
        super().__init__(inputs, 2 * width, bias=False)

    def lay_out(self) -> None:
        """Keep the two in oneDNN's order alone: `weight` is empty from now on."""
        if can_block(self.weight):
            self._gate = BlockedGate(self.weight)
            self.weight = _emptied(self.weight)

    def pack(self, room: LargePages) -> None:
        """Keep a packed weight alone, as `Linear` does."""
        if can_pack(self.weight):
            self._gate = PackedMatrix(self.weight, room, is_gated=True)
            self.weight = _emptied(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `silu(gate x) * (up x)`."""
        if self._gate is not None:
            return self._gate(x)
        gate, up = F.linear(x, self.weight).chunk(2, dim=-1)
        gated: Tensor = F.silu(gate) * up
        return gated


def _emptied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.new_empty(0), requires_grad=False)


def lay_out(network: nn.Module) -> None:
    """Lay out a network's weights where that helps; a second call changes nothing.

    The network can only be used in inference afterwards: its plain weights are gone.
    """
    for module in network.modules():
        if isinstance(module, LaysOut):
            module.lay_out()
