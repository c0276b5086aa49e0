"""The Python door: pictures in, captions out, in their order."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

import pipeline
from pipeline import load_captioner
from pipeline.captioner import SpeedSettings
from pipeline.errors import CheckpointError, SampleError
from pipeline.fixtures import make_image_bytes


def test_paths_bytes_and_pictures_have_a_caption_each_in_their_order(tmp_path: Path) -> None:
    data = [make_image_bytes(seed=seed) for seed in range(5)]
    (tmp_path / "one.jpg").write_bytes(data[1])
    picture = Image.open(io.BytesIO(data[2]))
    pictures = [data[0], tmp_path / "one.jpg", picture, str(tmp_path / "one.jpg"), data[4]]
    captions = load_captioner("scripted:shuffle=3", speed=SpeedSettings(slots=2))
    texts = captions.caption(pictures)
    assert len(texts) == 5
    assert all(text.startswith("a photo of") for text in texts)
    assert captions.caption(pictures) == texts
    assert captions.caption([]) == []
    assert captions.caption(pictures, prompt="Another.") != texts


def test_a_bad_picture_is_named_by_its_place() -> None:
    captions = load_captioner("scripted")
    with pytest.raises(SampleError, match=r"picture 1: .*not a picture"):
        captions.caption([make_image_bytes(), b"<html>"])
    with pytest.raises(SampleError, match=r"picture 0: nowhere\.jpg"):
        captions.caption(["nowhere.jpg"])


def test_a_wrong_model_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="no-such-model"):
        load_captioner("./no-such-model")


def test_the_door_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="open_sesame"):
        pipeline.open_sesame  # noqa: B018
