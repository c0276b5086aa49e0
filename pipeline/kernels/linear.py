"""Products of bfloat16 rows with a packed weight, on processors with matrix tiles (AMX).

    W x + b        other + W x + b        silu(gate x) * (up x)

summed in float32 and rounded once. A weight is packed once, in the order in which it is read:

    panels of 32 outputs ─► steps of 32 inputs ─► 2 tiles of 16 outputs, 1 KiB each
    (gated: 16 outputs' gate, and their up)       a tile's row: a pair of inputs of each output

Every row is computed by itself: neither neighbours nor threads take part in its numbers.
"""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.library import Part, part_of_tiles, run
from pipeline.kernels.pages import LargePages

# Must be what linear.c has under these names; the entry's number grows with every change.
_ENTRY = "captionjob_product_1"
PLAIN, ADDED, GATED = range(3)
PANEL = 32
INPUTS_OF_STEP = 32
ROWS_TOGETHER = 32
# Rows of a piece that stay in the second-level cache, beside the weight that goes through it.
BYTES_OF_ROWS = 768 << 10
MAX_ROWS_OF_PIECE = 256
# Fewer multiplications than this are done before another thread has woken up.
PRODUCTS_OF_THREAD = 1 << 18


class _Product(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("num_steps", c_int64),
        ("num_outputs", c_int64),
        ("num_panels", c_int64),
        ("panels_of_piece", c_int64),
        ("rows_of_piece", c_int64),
        ("ending", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("other", c_void_p),
        ("result", c_void_p),
    )


@cache
def _part() -> Part | None:
    """Return the kernel; None where it was not built, or the processor has no tiles."""
    return part_of_tiles("_linear", _ENTRY)


def can_pack(weight: Tensor) -> bool:
    """True where there is a kernel for a weight's device and dtype."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() > 0
        and _part() is not None
    )


class PackedMatrix:
    """A weight `[N, C]` in the order in which it is read; the plain one isn't kept."""

    def __init__(self, weight: Tensor, room: LargePages, *, is_gated: bool = False) -> None:
        """Pack a weight; a gated one has the gate's rows first, then as many others."""
        part = _part()
        assert part is not None
        self._part = part
        self._inputs = weight.shape[1]
        self._num_outputs = len(weight) // 2 if is_gated else len(weight)
        self._is_gated = is_gated
        self._packed = _packed(weight.detach(), room, is_gated)
        self._address = self._packed.data_ptr()
        self._num_panels, self._num_steps = self._packed.shape[:2]
        self._num_missing = self._num_steps * INPUTS_OF_STEP - self._inputs

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, other: Tensor | None = None
    ) -> Tensor:
        """Multiply `[..., C]`; returns `[..., N]`, or `[..., N / 2]` of a gated weight."""
        shape = (*x.shape[:-1], self._num_outputs)
        num_rows = x.numel() // self._inputs
        x = F.pad(x, (0, self._num_missing)) if self._num_missing else x.contiguous()
        if other is not None:
            other = (other if other.shape == shape else other.expand(shape)).contiguous()
        result = torch.empty(shape, dtype=torch.bfloat16)
        if num_rows == 0:
            return result
        num_panels, num_steps = self._num_panels, self._num_steps
        num_threads, rows_of_piece, panels_of_piece = _cut(
            num_rows, num_panels, num_steps, torch.get_num_threads()
        )
        job = _Product(
            0,
            num_rows,
            num_steps,
            self._num_outputs,
            num_panels,
            panels_of_piece,
            rows_of_piece,
            GATED if self._is_gated else PLAIN if other is None else ADDED,
            x.data_ptr(),
            self._address,
            None if bias is None else bias.data_ptr(),
            None if other is None else other.data_ptr(),
            result.data_ptr(),
        )
        run(self._part, job, num_threads)
        return result


def _packed(weight: Tensor, room: LargePages, is_gated: bool) -> Tensor:
    """Return `[panels, steps, 2, 16, 16, 2]` of a weight, with zeros for what is missing."""
    num_parts, num_inputs = (2 if is_gated else 1), weight.shape[1]
    parts = weight.view(num_parts, -1, num_inputs)
    width = PANEL // num_parts
    missing = (-num_inputs % INPUTS_OF_STEP, -parts.shape[1] % width)
    if any(missing):
        parts = F.pad(parts, (0, missing[0], 0, missing[1]))
    num_panels, num_steps = parts.shape[1] // width, parts.shape[2] // INPUTS_OF_STEP
    # [parts, panels, tiles of a part, outputs, steps, pairs, 2]
    tiles = parts.reshape(num_parts, num_panels, 2 // num_parts, 16, num_steps, 16, 2)
    packed = room.empty((num_panels, num_steps, 2, 16, 16, 2), torch.bfloat16)
    packed.view(num_panels, num_steps, num_parts, 2 // num_parts, 16, 16, 2).copy_(
        tiles.permute(1, 4, 0, 2, 5, 3, 6)
    )
    return packed


@lru_cache(maxsize=1024)
def _cut(num_rows: int, num_panels: int, num_steps: int, most: int) -> tuple[int, int, int]:
    """Return the threads, and the rows and panels of a piece: all rows if they fit a cache."""
    num_products = num_rows * num_panels * num_steps * PANEL * INPUTS_OF_STEP
    num_threads = min(most, 1 + num_products // PRODUCTS_OF_THREAD)
    num_fitting = BYTES_OF_ROWS // (num_steps * INPUTS_OF_STEP * torch.bfloat16.itemsize)
    rows = min(MAX_ROWS_OF_PIECE, num_fitting)
    if num_panels < num_threads:  # threads without a panel of their own share the rows
        rows = min(rows, num_rows * num_panels // num_threads)
    rows = max(ROWS_TOGETHER, rows // ROWS_TOGETHER * ROWS_TOGETHER)
    return num_threads, rows, -(-num_panels // num_threads)
