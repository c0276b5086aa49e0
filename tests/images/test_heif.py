"""HEIC with the `heif` extra and without it; AVIF with a Pillow that knows it and without one."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import SampleError
from pipeline.fixtures import make_image_bytes, make_picture
from pipeline.images.opening import ImageSettings, facts_of, open_image
from tests.commands import environment

HEADER = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
WITHOUT = """
import sys
sys.modules["pillow_heif"] = None
from PIL import Image
Image.init()
for kind in ("AVIF", "HEIF"):
    Image.OPEN.pop(kind, None)
from pipeline.errors import SampleError
from pipeline.images.opening import facts_of, open_image
data = sys.stdin.buffer.read()
try:
    open_image(data)
except SampleError as error:
    print(error.code, facts_of(data).format, facts_of(data).width, error.detail)
"""


def without_plug_ins(data: bytes) -> str:
    """Open bytes in a process that has neither plug-in, and return what it says."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], input=data, env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def test_heic_without_its_plug_in_is_a_row_that_says_what_to_install() -> None:
    wanted = "unsupported HEIF 0 HEIF cannot be opened here: pip install 'captionjob[heif]'"
    assert without_plug_ins(HEADER) == wanted


def test_avif_without_its_plug_in_is_a_row_too() -> None:
    data = b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(100)
    assert (
        without_plug_ins(data) == "unsupported AVIF 0 AVIF cannot be opened here with this Pillow"
    )


@pytest.fixture
def heif() -> Any:
    plug_in = pytest.importorskip("pillow_heif", reason="the heif extra is not installed")
    plug_in.register_heif_opener()
    return plug_in


def test_heic_is_opened_with_its_plug_in(heif: Any) -> None:
    data = make_image_bytes("HEIF", width=64, height=48, quality=95)
    picture, facts = open_image(data)
    assert (facts.format, facts.width, facts.height) == ("HEIF", 64, 48)
    assert type(picture) is Image.Image
    wanted = np.asarray(make_picture(64, 48)).astype(int)
    assert np.abs(np.asarray(picture).astype(int) - wanted).mean() < 4
    assert facts_of(data) == facts


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_turned_heic_is_upright_once(heif: Any, orientation: int) -> None:
    upright = Image.new("RGB", (64, 48), "white")
    upright.paste("red", (0, 0, 24, 24))
    turns = {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turns[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    stored.save(buffer, "HEIF", quality=95, exif=exif.tobytes())
    picture, facts = open_image(buffer.getvalue())
    assert picture.size == (facts.width, facts.height) == (64, 48)
    red, green, _ = picture.getpixel((8, 8))  # type: ignore[misc]
    assert red > 200
    assert green < 60


def test_heic_with_transparency_shows_the_background(heif: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(buffer, "HEIF", quality=95)
    picture, _ = open_image(buffer.getvalue(), ImageSettings(background="#00ff00"))
    assert picture.getpixel((32, 32)) == (0, 255, 0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_cut_heic_is_truncated(heif: Any, share: float) -> None:
    data = make_image_bytes("HEIF", width=96, height=64)
    with pytest.raises(SampleError) as caught:
        open_image(data[: int(len(data) * share)])
    assert caught.value.code == "truncated"


def test_the_pixel_limit_holds_for_heic(heif: Any) -> None:
    data = make_image_bytes("HEIF", width=64, height=64)
    with pytest.raises(SampleError) as caught:
        open_image(data, ImageSettings(max_pixels=1000))
    assert caught.value.code == "too_large"
