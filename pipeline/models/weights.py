"""Safetensors files into a network built on the meta device, a few rows at a time.

    stored q [16, 8] ─┐
    stored k [ 4, 8] ─┼─► qkv.weight [24, 8]     stacked along the rows while they are copied
    stored v [ 4, 8] ─┘

Names and shapes are checked before any weight is read. The network then takes shape tensor by
tensor in its final dtype and device; a file is mapped for one slice of rows at a time, so the
pages of what was read are given back, and there are never two copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.errors import CheckpointError
from pipeline.models.stored import StoredTensor, WeightFiles

SLICE_BYTES = 16 << 20
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor that fills `rows` rows of a parameter (0: all that are left)."""

    names: tuple[str, ...]  # of a tied weight: the first of these that is there
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's stored tensors become parameters.

    `sources` gives for each parameter what is stacked along its rows. `renames` are prefixes
    that older files have, with what stands for them here. `ignored` are patterns of stored
    tensors that nothing needs.
    """

    sources: Mapping[str, tuple[Source, ...]]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def canonical(self, stored: str) -> str:
        """Return the name that `sources` uses for a stored tensor."""
        for old, new in self.renames:
            if stored.startswith(old):
                return new + stored[len(old) :]
        return stored


class _SkipInit(TorchFunctionMode):
    """Leave random initialisation out: on the meta device it only imports torch's compiler.

    That import takes two seconds and 80 MB.
    """

    skipped = ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_", "fill_", "zero_")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in self.skipped:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def unfilled() -> Iterator[None]:
    """Build networks on the meta device: shapes without numbers, for `load_weights` to fill."""
    with torch.device("meta"), _SkipInit():
        yield


def load_weights(
    model: nn.Module, layout: Layout, folder: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill a network that was built on the meta device from a checkpoint's folder.

    Raises CheckpointError, before anything is read, where a tensor is missing, unexpected or of
    another shape: one line that names the file, the tensor and both shapes.
    """
    stored = WeightFiles.find(folder)
    plan = _plan(model, layout, stored)
    for name, pieces in plan.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        parameter = torch.empty(owner.get_parameter(leaf).shape, dtype=dtype, device=device)
        rows = 0
        for piece in pieces:
            rows += _copy_rows(piece, parameter, rows)
        owner.register_parameter(leaf, nn.Parameter(parameter, requires_grad=False))


def check_weights(model: nn.Module, layout: Layout, folder: Path) -> None:
    """Raise what `load_weights` would raise, reading headers alone."""
    _plan(model, layout, WeightFiles.find(folder))


def _plan(
    model: nn.Module, layout: Layout, stored: WeightFiles
) -> dict[str, tuple[StoredTensor, ...]]:
    """Match stored tensors to parameters; all that can be wrong is found here."""
    tensors = {layout.canonical(name): tensor for name, tensor in stored.tensors.items()}
    parameters = dict(model.named_parameters())
    assert parameters.keys() == layout.sources.keys(), parameters.keys() ^ layout.sources.keys()
    plan: dict[str, tuple[StoredTensor, ...]] = {}
    for name, parameter in parameters.items():
        rows_left = parameter.shape[0]
        pieces: list[StoredTensor] = []
        for source in layout.sources[name]:
            rows = source.rows or rows_left
            rows_left -= rows
            pieces.append(_match(source, tensors, (rows, *parameter.shape[1:]), stored.folder))
        assert rows_left == 0, f"{name}: {rows_left} rows have no source"
        plan[name] = tuple(pieces)
    _check_all_used(tensors, layout)
    return plan


def _match(
    source: Source, tensors: Mapping[str, StoredTensor], wanted: tuple[int, ...], folder: Path
) -> StoredTensor:
    found = next((tensors[name] for name in source.names if name in tensors), None)
    if found is None:
        names = " or ".join(source.names)
        raise CheckpointError(f"{folder}: no tensor {names}; wanted one of shape {list(wanted)}")
    if _core(found.shape) != _core(wanted):
        raise CheckpointError(
            f"{found.file}: {found.name} has shape {list(found.shape)}; "
            f"config.json asks for {list(wanted)}"
        )
    if found.dtype not in FLOATS:
        raise CheckpointError(
            f"{found.file}: {found.name} is stored as {found.dtype}; wanted {', '.join(FLOATS)}"
        )
    return found


def _check_all_used(tensors: Mapping[str, StoredTensor], layout: Layout) -> None:
    known = {name for parts in layout.sources.values() for part in parts for name in part.names}
    ignored = re.compile("|".join(layout.ignored) or r"(?!)")
    for name, tensor in tensors.items():
        if name not in known and not ignored.fullmatch(name):
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} {list(tensor.shape)} has no place in the network "
                "that config.json describes"
            )


def _core(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop leading ones: some files keep positions as `[1, P, C]`."""
    sizes = list(shape)
    while len(sizes) > 1 and sizes[0] == 1:
        sizes.pop(0)
    return tuple(sizes)


def _copy_rows(piece: StoredTensor, parameter: Tensor, start: int) -> int:
    """Copy a stored tensor into a parameter from row `start` on; return how many rows."""
    shape = _core(piece.shape)
    leading: tuple[int | slice, ...] = (0,) * (len(piece.shape) - len(shape))
    num_rows = torch.Size(shape).numel() // parameter[0].numel()
    target = parameter[start : start + num_rows].view(shape)
    step = max(1, SLICE_BYTES // (4 * target[0].numel()))
    for row in range(0, shape[0], step):
        # Opened anew each time, since only closing a mapped file gives its pages back.
        with safe_open(piece.file, framework="pt") as opened:
            part = (*leading, slice(row, row + step))
            target[row : row + step] = opened.get_slice(piece.name)[part]
    return num_rows
