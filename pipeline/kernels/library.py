"""Finding the compiled kernels, and running them on torch's own threads.

They are built where captionjob is installed with a C compiler at hand, and not needed: `found()`
is None without them. No link to Python or torch, so ctypes is all that it takes.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int64, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# Its number grows with every change of a struct: a library left over from before is not used.
_ENTRY = "captionjob_functions_3"
_DTYPES = (torch.bfloat16, torch.float32)


class _Functions(Structure):
    _fields_ = (
        ("kind", c_char_p),
        ("lanes", c_int64),
        ("attention", c_void_p * len(_DTYPES)),
        ("norm", c_void_p * len(_DTYPES)),
        ("choice", c_void_p * len(_DTYPES)),
    )


Part = int  # the address of a function that takes the address of its job


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels of one kind of processor; parts by dtype."""

    kind: str
    lanes: int  # floats in a vector: widths of heads must be a multiple
    attention: dict[torch.dtype, Part]
    norm: dict[torch.dtype, Part]
    choice: dict[torch.dtype, Part]

    def run(self, part: Part, job: Structure, num_threads: int) -> None:
        """Let this many of torch's threads work at a job, and wait for its end."""
        run(part, job, num_threads)


def run(part: Part, job: Structure, num_threads: int) -> None:
    """Let this many of torch's threads work at a job, and wait for its end.

    A job counts the pieces that were taken, so it is used once; threads that find none left
    return at once.
    """
    team = _team()
    if team is None or num_threads == 1:
        _callable(part)(ctypes.addressof(job))
    else:
        team(part, ctypes.addressof(job), num_threads, 0)


@cache
def _callable(part: Part) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, c_void_p)(part)


@cache
def found() -> Library | None:
    """Return the kernels for this processor; None where they were not built."""
    return of_kind(-1)


@cache
def of_kind(kind: int) -> Library | None:
    """Return the kernels at a place of the library's list, the best one for -1."""
    address = entry("_decode", _ENTRY)
    if address is None:
        return None
    functions = ctypes.CFUNCTYPE(POINTER(_Functions), c_int64)(address)(kind)
    if not functions:
        return None
    these = functions.contents
    by_dtype = (
        dict(zip(_DTYPES, getattr(these, name), strict=True)) for name, _ in _Functions._fields_[2:]
    )
    return Library(these.kind.decode(), these.lanes, *by_dtype)


def part_of_tiles(module: str, name: str) -> Part | None:
    """Ask an entry for its kernel; None where it was not built, or the processor has no tiles."""
    address = entry(module, name)
    if address is None:
        return None
    part: Part | None = ctypes.CFUNCTYPE(c_void_p)(address)()
    return part


def entry(module: str, name: str) -> int | None:
    """Return the address of a function of a compiled module; None where it was not built."""
    path = Path(__file__).with_name(f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(path)), name), c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def _team() -> Callable[[Part, int, int, int], None] | None:
    """Return what starts torch's own OpenMP threads; None where torch has no OpenMP.

    torch's threads look for more work for a while after each operation. Threads of another pool
    would have to share the cores with them.
    """
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        try:
            # Looked up in what torch was linked to, too: the OpenMP library.
            team = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        team.argtypes, team.restype = [c_void_p, c_void_p, c_uint, c_uint], None
        return team
    return None
