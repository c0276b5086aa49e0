"""Where a network's numbers live, how wide they are, and whether products are of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.errors import RequestError
from pipeline.models.int8 import what_is_missing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and a dtype, both found to work here, and what is quantised."""

    device: torch.device
    dtype: torch.dtype
    quantize: str = "none"

    @classmethod
    def choose(cls, device: str, dtype: str, quantize: str = "none") -> Placement:
        """Turn `--device` and `--dtype` into what this machine has; `auto` takes the best.

        Raises RequestError where `--quantize int8` can't be had on it.
        """
        chosen = choose_device(device)
        width = choose_dtype(dtype, chosen)
        if quantize == "int8":
            check_int8(chosen, width)
        return cls(chosen, width, quantize)

    def enter(self) -> None:
        """Make the device this thread's own: torch puts its streams and events there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")


def choose_device(name: str) -> torch.device:
    """Return the device of `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; RequestError if absent.

    `auto@3` and `cuda@3` are those of the fourth worker on this machine: workers take the GPUs
    that are visible here in turn. A GPU without a number is the first one that is visible.
    """
    name, _, worker = name.partition("@")
    if worker and name != "cpu" and torch.cuda.device_count() > 1:
        return torch.device("cuda", int(worker) % torch.cuda.device_count())
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise RequestError(f"--device is {name!r}; wanted auto, cpu, cuda, cuda:N or mps")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise RequestError("--device is mps; this machine has no Apple GPU that torch can use")
    if kind == "cuda":
        num_devices = torch.cuda.device_count()
        if int(number or 0) >= num_devices:
            raise RequestError(f"--device is {name}; torch sees {num_devices} CUDA devices here")
        return torch.device("cuda", int(number or 0))
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `auto`, `float32`, `bfloat16` or `float16`.

    `auto` is bfloat16 where the device multiplies it in hardware (two to three times as fast
    as float32 on a processor with AVX512_BF16 or AMX), and float32 elsewhere.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise RequestError(f"--dtype is {name!r}; wanted auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_int8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise RequestError unless 8-bit products run here, and fast, between numbers of `dtype`."""
    if device.type != "cpu":
        raise RequestError(f"--quantize int8: the device is {device}; wanted --device cpu")
    if dtype not in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        raise RequestError(f"--quantize int8: --dtype is {name}; wanted bfloat16 or float32")
    missing = what_is_missing(dtype)
    if missing:
        raise RequestError(
            f"--quantize int8: {missing}; wanted a processor with AVX512_VNNI or AMX"
        )


def has_fast_bfloat16(device: torch.device) -> bool:
    """True where bfloat16 products run in hardware."""
    if device.type == "cuda":
        # Ampere or later, of this very GPU; AMD's have it wherever torch runs on them.
        is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return is_ampere or torch.version.hip is not None
    if device.type == "cpu":
        # Older releases of torch cannot say; float32 is right everywhere.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, probe, bool)() for probe in probes)
    return False
