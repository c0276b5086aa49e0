"""The default model's weights on disk: int8 with a scale for each row, the rest in half precision.

`name` holds the int8 rows and `name.scale` their scales; numbers that only the model knows how to
read (sizes, thresholds) are JSON in the file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SCALE = ".scale"
LEAST_SIZE = 4096  # smaller tensors save nothing worth their rounding
INT8_MOST = 127.0


def pack(state: dict[str, Tensor], exact: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """Quantise a state dict; tensors named in `exact` are kept in half precision."""
    packed = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            packed[name] = tensor.contiguous()
            continue
        if tensor.numel() < LEAST_SIZE or tensor.dim() < 2 or name in exact:
            packed[name] = tensor.half().contiguous()
            continue
        rows = tensor.float().flatten(1)
        # Clamped: an all-zero row would otherwise divide by zero.
        scale = (rows.abs().amax(dim=1) / INT8_MOST).clamp(min=1e-8)
        packed[name] = (rows / scale[:, None]).round().to(torch.int8).view(tensor.shape)
        packed[name + SCALE] = scale
    return packed


def unpack(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 state dict of packed tensors."""
    state = {}
    for name, tensor in packed.items():
        if name.endswith(SCALE):
            continue
        scale = packed.get(name + SCALE)
        if scale is None:
            state[name] = tensor.float() if tensor.is_floating_point() else tensor
        else:
            state[name] = (tensor.float().flatten(1) * scale[:, None]).view(tensor.shape)
    return state


def write(path: Path, packed: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write packed tensors, and facts as JSON in the metadata."""
    save_file(packed, path, metadata={"facts": json.dumps(facts)})
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` wrote."""
    with safe_open(path, framework="pt") as stored:
        packed = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        facts = json.loads(stored.metadata()["facts"])
    return packed, facts
