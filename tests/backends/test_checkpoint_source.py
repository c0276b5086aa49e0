"""From a folder to captions: each native family, whole, through the job's own seam."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.backends.checkpoint_source import MemoryNeed, checkpoint_source
from pipeline.captioner import Captioner, SamplingSettings, SpeedSettings
from pipeline.checkpoints import find_checkpoint
from pipeline.errors import CheckpointError, RequestError
from pipeline.records import Caption, ImageFacts, ImageInputs, Request, SampleRef
from tests.backends.sources import ListSource
from tests.models.checkpoints import TinyIdefics3, TinyLlava, picture

NANO = Path(__file__).parent.parent / "data" / "nanovlm"
SPEED = SpeedSettings(slots=4, prefill_batch=3, threads=1)


def save(name: str, folder: Path) -> None:
    """Save a tiny checkpoint of a family."""
    if name.startswith("nanovlm"):
        source = NANO / ("tiny_v01" if name.endswith("first") else "tiny")
        shutil.copytree(source, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config["resize_to_max_side_len"] = False  # or 17 tiles would not fit in 256 positions
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copytree(NANO / "tokenizer", folder / "tokenizer")
        return
    pytest.importorskip("transformers")
    tiny: Any = TinyIdefics3("source") if name == "idefics3" else TinyLlava("source")
    tiny.save(folder)


@pytest.fixture(scope="module", params=["nanovlm", "nanovlm, the first", "idefics3", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "tiny-model"
    place.mkdir()
    save(request.param, place)
    return place


def caption_all(captioner: Captioner, num: int = 6) -> list[Caption]:
    requests = [
        captioner.prepare(
            SampleRef("s", index, f"k{index}", "m.png"),
            ImageFacts(),
            picture(40 + 9 * index, 64),
            "word " * index,
            {},
        )
        for index in range(num)
    ]
    found = list(captioner.caption(ListSource(requests)))
    return sorted(found, key=lambda caption: caption.request.ref.index)


def test_a_folder_captions_through_the_engine(folder: Path) -> None:
    source = checkpoint_source(str(folder), dtype="float32", device="cpu")
    assert source.backend == "native"
    assert source.family in ("nanovlm", "idefics3", "llava")
    captioner = source.load(SamplingSettings(max_new_tokens=6), SPEED)
    rows = caption_all(captioner)
    assert [row.error for row in rows] == [None] * 6
    assert all(row.text is not None and row.num_caption_tokens for row in rows)
    alone = source.load(SamplingSettings(max_new_tokens=6), SpeedSettings(slots=1, threads=1))
    assert [row.text for row in caption_all(alone)] == [row.text for row in rows]


def test_the_fingerprint_names_model_family_and_weights(folder: Path) -> None:
    source = checkpoint_source(str(folder), dtype="bfloat16", device="cpu")
    found = dict(source.fingerprint)
    assert found["model"] == "tiny-model"
    assert found["dtype"] == "bfloat16"
    assert len(found["weights_sha256"]) == 64


def test_the_preview_counts_as_the_network_does(folder: Path) -> None:
    source = checkpoint_source(str(folder), dtype="float32", device="cpu")
    captioner = source.load(SamplingSettings(), SPEED)
    preview = captioner.preview(picture(50, 60), "What is this?")
    assert "What is this?" in preview.text
    request = captioner.prepare(
        SampleRef("s", 0, "k", "m"), ImageFacts(), picture(50, 60), "What is this?", {}
    )
    assert preview.ids == request.prompt_ids


def test_memory_is_told_without_weights(folder: Path) -> None:
    need = MemoryNeed.of(find_checkpoint(str(folder)))
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert need.num_weights == stored
    assert need.cache_numbers_per_token in (2 * 3 * 2 * 16, 2 * 2 * 2 * 16)


def test_features_and_places_are_counted_for_each_request(folder: Path) -> None:
    captioner = checkpoint_source(str(folder), dtype="float32", device="cpu").load(
        SamplingSettings(max_new_tokens=2), SPEED
    )
    good = captioner.prepare(SampleRef("s", 0, "good", "m"), ImageFacts(), picture(64, 64), "x", {})
    assert good.images is not None
    twice = ImageInputs(torch.cat([good.images.pixels] * 2, dim=0).float())
    bad = Request(SampleRef("s", 1, "bad", "m"), ImageFacts(), good.prompt_ids, twice)
    found = {row.request.ref.key: row for row in captioner.caption(ListSource([good, bad]))}
    assert found["good"].error is None
    assert found["bad"].error == "placeholder_mismatch"


def test_backends_that_cannot_are_told(folder: Path, tmp_path: Path) -> None:
    if (folder / "tokenizer").is_dir():
        with pytest.raises(CheckpointError, match="transformers does not know nanoVLM"):
            checkpoint_source(str(folder), backend="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(CheckpointError, match="do not run model_type qwen2_vl"):
        checkpoint_source(str(tmp_path), backend="native")


def test_auto_takes_the_library_where_our_network_lacks_something(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    TinyLlava("biased", text={"attention_bias": True}).save(tmp_path)
    source = checkpoint_source(str(tmp_path), dtype="float32", device="cpu")
    assert source.backend == "transformers"
    with pytest.raises(CheckpointError, match="attention_bias is True"):
        checkpoint_source(str(tmp_path), backend="native")


def test_a_broken_native_checkpoint_does_not_fall_to_the_library(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    TinyLlava("broken").save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        checkpoint_source(str(tmp_path), device="cpu")


def test_a_system_text_is_in_the_prompt_where_the_family_has_a_chat(folder: Path) -> None:
    if (
        "vit_hidden_dim" in (folder / "config.json").read_text()
        and "lm_chat_template" not in (folder / "config.json").read_text()
    ):
        with pytest.raises(RequestError, match="no chat template"):
            checkpoint_source(str(folder), device="cpu", system="Be brief.")
        return
    source = checkpoint_source(str(folder), dtype="float32", device="cpu", system="Be brief.")
    captioner = source.load(SamplingSettings(), SPEED)
    assert "Be brief." in captioner.preview(picture(64, 64), "x").text
