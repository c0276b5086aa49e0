"""`--quantize int8`: loaded with steps from example photographs, or refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.config import RunConfig
from jobs.run import Run
from pipeline.backends import native_source, placement
from pipeline.backends.calibration import calibration_inputs, few_tiles, pictures
from pipeline.backends.checkpoint_source import checkpoint_source
from pipeline.backends.placement import Placement, check_int8
from pipeline.backends.resolve import resolve
from pipeline.captioner import Captioner, ModelSource, SamplingSettings, SpeedSettings
from pipeline.errors import CheckpointError, RequestError
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.models.int8 import what_is_missing
from pipeline.models.quantising import vision_towers
from pipeline.models.vlm import VisionLanguageModel
from pipeline.records import ImageInputs
from tests.backends.test_checkpoint_source import caption_all, save
from tests.models.checkpoints import TinyIdefics3, save_paligemma

can_run = pytest.mark.skipif(
    what_is_missing(torch.float32) is not None, reason="no fast 8-bit products here"
)
SAMPLING = SamplingSettings(max_new_tokens=6)


@pytest.fixture(scope="module", params=["nanovlm", "nanovlm, the first", "idefics3", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "tiny-model"
    place.mkdir()
    save(request.param, place)
    return place


def source_of(folder: Path, quantize: str = "int8", dtype: str = "float32") -> ModelSource:
    return checkpoint_source(str(folder), dtype=dtype, device="cpu", quantize=quantize)


def texts(captioner: Captioner) -> list[str | None]:
    rows = caption_all(captioner)
    assert [row.error for row in rows] == [None] * len(rows)
    return [row.text for row in rows]


@can_run
def test_captions_in_8_bits_depend_on_no_neighbour_slot_or_padding(folder: Path) -> None:
    source = source_of(folder)
    speeds = (
        SpeedSettings(slots=1, prefill_batch=1, threads=1),
        SpeedSettings(slots=4, prefill_batch=3, threads=1),
        SpeedSettings(slots=16, prefill_batch=8, threads=1),
    )
    captioners = [source.load(SAMPLING, speed) for speed in speeds]
    found = [texts(captioner) for captioner in captioners]
    assert found[0] == found[1] == found[2]
    (said,) = {n for captioner in captioners for n in captioner.notices if n.startswith("int8")}
    assert re.match(r"int8: (8|12) matrices \(0\.\d million weights\), image features off by", said)


@can_run
def test_image_features_are_near_those_of_the_plain_network(folder: Path) -> None:
    """The whole way from the checkpoint's weights, which were never in 8 bits."""
    features = []
    for quantize in ("none", "int8"):
        source = source_of(folder, quantize)
        assert isinstance(source, native_source.NativeSource)
        model = source.build(source.placement)
        source._quantise(model)
        assert isinstance(model, VisionLanguageModel)
        (tower,) = vision_towers(model)
        inputs = calibration_inputs(source.processor, tower.spec.image_size)
        with torch.inference_mode():
            features.append(torch.cat(model.encode_images(inputs)))
    plain, found = features
    error = float((found - plain).norm() / plain.norm())
    assert 0.002 < error < 0.1


def test_the_fingerprint_names_it_only_where_it_is_chosen(tmp_path: Path) -> None:
    save("nanovlm", tmp_path / "tiny")
    assert "quantize" not in source_of(tmp_path / "tiny", "none").fingerprint
    if what_is_missing(torch.float32) is None:
        assert source_of(tmp_path / "tiny").fingerprint["quantize"] == "int8"


@can_run
def test_a_job_in_8_bits_is_no_other_job(tmp_path: Path) -> None:
    save("nanovlm", tmp_path / "tiny")
    members = [(f"{index}.jpg", make_image_bytes(seed=index)) for index in range(3)]
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    config = RunConfig(
        shards=(str(tmp_path / "a.tar"),),
        out=tmp_path / "out",
        model=str(tmp_path / "tiny"),
        dtype="float32",
        quantize="int8",
        sampling=SamplingSettings(max_new_tokens=3),
        speed=SpeedSettings(slots=2, prefill_batch=2, device="cpu", threads=1),
    )
    assert Run(config).run().snapshot.images == 3
    assert Run(config).run().snapshot.images == 0  # all done
    with pytest.raises(RequestError) as refused:
        Run(replace(config, quantize="none")).run()
    assert 'model.quantize: "int8" there, nothing now' in str(refused.value)
    plain = replace(config, quantize="none", out=tmp_path / "plain")
    Run(plain).run()
    with pytest.raises(RequestError) as refused:
        Run(replace(plain, quantize="int8")).run()
    assert 'model.quantize: nothing there, "int8" now' in str(refused.value)


@can_run
def test_a_network_that_8_bits_do_not_suit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("nanovlm", tmp_path / "tiny")
    monkeypatch.setattr(native_source, "MAX_ERROR", 0.001)
    with pytest.raises(CheckpointError) as refused:
        source_of(tmp_path / "tiny").load(SAMPLING, SpeedSettings(slots=2, threads=1))
    assert "--quantize int8 does not suit --model 'tiny': " in str(refused.value)
    assert "at most 0% is taken; wanted --quantize none" in str(refused.value)


def test_other_devices_dtypes_and_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="the device is cuda:1; wanted --device cpu"):
        check_int8(torch.device("cuda", 1), torch.bfloat16)
    with pytest.raises(RequestError, match="--dtype is float16; wanted bfloat16 or float32"):
        Placement.choose("cpu", "float16", "int8")
    monkeypatch.setattr(placement, "what_is_missing", lambda dtype: "nothing works")
    with pytest.raises(RequestError) as refused:
        Placement.choose("cpu", "float32", "int8")
    assert str(refused.value) == (
        "--quantize int8: nothing works; wanted a processor with AVX512_VNNI or AMX"
    )
    assert Placement.choose("cpu", "float32").quantize == "none"


def test_backends_without_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--quantize int8: --model scripted has no weights"):
        resolve("scripted", quantize="int8")
    with pytest.raises(RequestError, match="--quantize is 'int4'; wanted none, int8"):
        resolve("default", quantize="int4")
    pytest.importorskip("transformers")
    save_paligemma(tmp_path)
    with pytest.raises(RequestError, match="runs on transformers; wanted a network of our own"):
        resolve(str(tmp_path), dtype="float32", device="cpu", quantize="int8")
    own = tmp_path / "own"
    TinyIdefics3("own").save(own)
    with pytest.raises(RequestError, match="runs on transformers"):
        resolve(str(own), backend="transformers", quantize="int8")


def test_the_photographs_are_there_and_have_light_and_shade() -> None:
    found = pictures()
    assert len(found) == 8
    assert all(image.mode == "RGB" and 200 <= max(image.size) <= 320 for image in found)
    grey = [image.convert("L").resize((8, 8)).getextrema() for image in found]
    assert all(int(high) - int(low) > 80 for low, high in grey)


def test_a_picture_of_many_tiles_is_a_part_and_the_whole() -> None:
    tiles = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 16, 16)
    mask = torch.arange(5)[:, None, None].expand(5, 2, 2) > 0
    few = few_tiles(ImageInputs(tiles, mask), 16)
    assert few.patch_mask is not None
    assert few.pixels[:, 0, 0, 0].tolist() == [0, 4]
    assert few.patch_mask[:, 0, 0].tolist() == [False, True]
    uncut = torch.full((1, 3, 64, 32), 7, dtype=torch.uint8)
    small = few_tiles(ImageInputs(uncut), 32).pixels
    assert small.dtype == torch.uint8
    assert small.shape == (1, 3, 32, 32)
    assert bool((small == 7).all())
