"""The files of a checkpoint's folder: its JSON, and what its safetensors hold by name.

Headers alone are read here; `weights.py` copies the numbers. No pickle is ever opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import CheckpointError
from pipeline.models.config import Config

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and its shape; `name` is as in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint folder, one or sharded."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @classmethod
    def find(cls, folder: Path) -> WeightFiles:
        """List a folder's weight files and their tensors; CheckpointError where there are none."""
        files = weight_paths(folder)
        tensors = {tensor.name: tensor for file in files for tensor in _stored_tensors(file)}
        return cls(folder, files, tensors)

    @property
    def num_parameters(self) -> int:
        """How many numbers are stored."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors.values())


def read_config(folder: Path, name: str = "config.json") -> Config:
    """Read a JSON file of a checkpoint; CheckpointError where it is none."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: wanted a JSON object")
    return Config(values, str(path))


def read_optional(folder: Path, name: str) -> Config:
    """Read a JSON file of a checkpoint; an empty object where there is no such file."""
    return read_config(folder, name) if (folder / name).is_file() else Config({}, name)


def read_image_config(folder: Path) -> Config:
    """Read how pictures are made ready: newer checkpoints keep it inside processor_config.json."""
    processor = read_optional(folder, "processor_config.json")
    if "image_processor" in processor:
        return processor.section("image_processor")
    return read_config(folder, "preprocessor_config.json")


def weight_paths(folder: Path) -> tuple[Path, ...]:
    """Return a folder's safetensors files; CheckpointError, in one line, where one is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            paths = tuple(folder / Path(name).name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files: {error}") from None
        missing = [path.name for path in paths if not path.is_file()]
        if missing or not paths:
            found = ", ".join(missing) or "no file at all"
            raise CheckpointError(f"{index} names {found}, which the folder lacks")
        return paths
    if (folder / WHOLE_FILE).is_file():
        return (folder / WHOLE_FILE,)
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{folder} holds {pickles[0]} and no {WHOLE_FILE}; pickled weights can run code "
            "when they are opened, so only safetensors are read"
        )
    raise CheckpointError(f"{folder} has no {WHOLE_FILE} and no {INDEX_FILE}")


def weights_sha256(folder: Path) -> str:
    """Return the hex SHA-256 of a checkpoint's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in weight_paths(folder):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _stored_tensors(file: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                part = opened.get_slice(name)
                yield StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from None
