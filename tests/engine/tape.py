"""A CUDA graph's stand-in on a processor: operations are taped, and replayed on the same memory.

As with the real one, taping changes nothing, and a replay runs exactly what was taped: the same
operations, on the same tensors, with the Python values of that moment. A step that reads anything
but its buffers gives stale tokens here, as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.engine.device import CapturingDevice, Device


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # what was written to, and what it held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func._schema.is_mutable:
            self.before += [(one, one.clone()) for one in given]
        out = func(*args, **kwargs)
        memory = {one.untyped_storage().data_ptr() for one in given}
        results = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        fresh = [one for one in results if one.untyped_storage().data_ptr() not in memory]
        if func._schema.is_mutable or fresh:  # a view of the same memory needs no call again
            self.calls.append((func, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        for tensor, held in reversed(self.before):
            tensor.copy_(held)
        self.before.clear()

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            out = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
            for kept, new in zip(fresh, out, strict=False):
                kept.copy_(new)


class TapedDevice(CapturingDevice):
    """A processor that is used as a GPU would be: tokens read late, decode steps captured."""

    def __init__(self, place: torch.device, lag: int) -> None:
        super().__init__(place)
        self.lag = lag
        self.num_captured = self.num_replayed = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        with tape:
            work()
        tape.undo()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            tape.replay()

        return replay


class LateDevice(Device):
    """A processor whose tokens are read so many steps late."""

    def __init__(self, place: torch.device, lag: int) -> None:
        super().__init__(place)
        self.lag = lag
