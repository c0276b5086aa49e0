"""Weights: every wrong file is one line, and loading never holds two copies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.models.nanovlm import NanoVLM, NanoVLMSpec, load_nanovlm, weight_layout
from pipeline.models.stored import WeightFiles, read_config, weight_paths, weights_sha256
from pipeline.models.weights import unfilled

DATA = Path(__file__).parent.parent / "data" / "nanovlm"
CPU = torch.device("cpu")
QUERY = "decoder.blocks.0.attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "tiny" / name, tmp_path)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_nanovlm(folder, torch.float32, CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard(folder: Path) -> None:
    """Split the one file into two shards and an index, as large checkpoints have."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(QUERY) is None)
    assert QUERY in error_of(folder)
    assert "[64, 64]" in error_of(folder)


def test_a_wrong_shape_names_file_tensor_and_both_shapes(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({QUERY: torch.zeros(63, 64)}))
    error = error_of(folder)
    for part in ("model.safetensors", QUERY, "[63, 64]", "[64, 64]"):
        assert part in error


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"lora.weight": torch.zeros(2, 3)}))
    error = error_of(folder)
    assert "lora.weight [2, 3]" in error


def test_integers_are_no_weights(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64, dtype=torch.int8)}))
    assert "I8" in error_of(folder)


def test_a_cut_file_is_told_before_anything_is_loaded(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        assert "model.safetensors: not a whole safetensors file" in error_of(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors are read" in error_of(folder)


def test_no_weights_at_all_says_what_is_wanted(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in error_of(folder)


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = load_nanovlm(folder, torch.float32, CPU)
    shard(folder)
    sharded = load_nanovlm(folder, torch.float32, CPU)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sharded.get_parameter(name)), name


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in error_of(folder)


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    index = {"weight_map": {"a": "../../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "elsewhere.safetensors, which the folder lacks" in error_of(folder)


def test_each_tensor_is_cast_to_the_wanted_dtype(folder: Path) -> None:
    exact = load_nanovlm(folder, torch.float32, CPU)
    half = load_nanovlm(folder, torch.bfloat16, CPU)
    for name, parameter in exact.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter.bfloat16()), name


def test_the_checksum_is_of_the_bytes(folder: Path) -> None:
    before = weights_sha256(folder)
    change(folder, lambda tensors: tensors[QUERY].add_(1.0).sum())
    assert weights_sha256(folder) != before
    assert len(before) == 64
    assert weight_paths(folder) == (folder / "model.safetensors",)
    assert WeightFiles.find(folder).num_parameters == 184_712


MEASURE = """
import resource, sys, torch
from pathlib import Path
from pipeline.models.nanovlm import load_nanovlm
folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
model = load_nanovlm(folder, dtype, torch.device("cpu"))
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(weights, peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint large enough that a process's own memory does not count."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((DATA / "tiny/config.json").read_text())
    config |= {"lm_hidden_dim": 1024, "lm_inter_dim": 4096, "lm_n_heads": 16, "lm_n_kv_heads": 4}
    config |= {"lm_n_blocks": 8, "lm_vocab_size": 40_066, "lm_base_vocab_size": 40_000}
    (folder / "config.json").write_text(json.dumps(config))
    write_zeros(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_less_than_1_15_times_the_weights(large: Path, dtype: str) -> None:
    """Measured from outside: the high-water mark of a process that only loads."""
    command = [sys.executable, "-c", MEASURE, str(large), dtype]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weights, peak = (int(part) for part in printed.split())
    assert weights > 300e6
    assert peak < 1.15 * weights


def write_zeros(folder: Path) -> None:
    """Save a checkpoint of the right names and shapes."""
    spec = NanoVLMSpec.from_config(read_config(folder))
    with unfilled():
        model = NanoVLM(spec)
    tensors: dict[str, Tensor] = {}
    for name, sources in weight_layout(spec).sources.items():
        shape = model.get_parameter(name).shape
        for source in sources:
            rows = source.rows or shape[0]
            tensors[source.names[0]] = torch.zeros(rows, *shape[1:])
    save_file(tensors, folder / "model.safetensors")
