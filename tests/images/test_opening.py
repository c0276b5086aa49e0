"""Bytes that nobody trusts to upright RGB, or to an error with a stable code."""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageFile

from pipeline.errors import RequestError, SampleError
from pipeline.fixtures import make_image_bytes, make_picture
from pipeline.images.opening import ImageSettings, facts_of, open_image, open_sample
from pipeline.records import ImageFacts, Sample, SampleRef
from tests.commands import environment

FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000"]
Image.init()
FORMATS += ["AVIF"] if "AVIF" in Image.SAVE else []
SEED_FILES = {name: make_image_bytes(name) for name in FORMATS}


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pixels(data: bytes, **options: object) -> NDArray[np.int64]:
    picture, _ = open_image(data, ImageSettings(**options))  # type: ignore[arg-type]
    assert picture.mode == "RGB"
    return np.asarray(picture).astype(int)


def code_of(data: bytes, **options: object) -> str:
    with pytest.raises(SampleError) as caught:
        open_image(data, ImageSettings(**options))  # type: ignore[arg-type]
    assert "\n" not in caught.value.detail
    assert " at 0x" not in caught.value.detail
    return caught.value.code


def is_near(found: NDArray[np.int64], wanted: object, tolerance: int = 2) -> bool:
    return bool((np.abs(found - np.asarray(wanted)) <= tolerance).all())


@pytest.mark.parametrize("format", FORMATS)
def test_every_usual_format_is_opened(format: str) -> None:
    data = SEED_FILES[format]
    picture, facts = open_image(data)
    assert picture.mode == "RGB"
    assert type(picture) is Image.Image  # not a file that is still open
    digest = hashlib.sha256(data).hexdigest()
    assert facts == ImageFacts(picture.width, picture.height, format, digest)


def test_a_name_does_not_matter_only_bytes_do() -> None:
    sample = Sample(SampleRef("s", 0, "a", "a.jpg"), SEED_FILES["PNG"])
    assert open_sample(sample)[1].format == "PNG"
    faulty = Sample(sample.ref, b"", fault=SampleError("link", "a link"))
    with pytest.raises(SampleError, match="link: a link"):
        open_sample(faulty)


# --- what is upright, opaque, 8 bits and sRGB ---


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_all_eight_orientations_are_turned_upright(format: str, orientation: int) -> None:
    corners = Image.new("RGB", (48, 32), "white")
    corners.paste("red", (0, 0, 16, 16))
    corners.paste("blue", (32, 0, 48, 16))
    corners.paste("green", (0, 16, 16, 32))
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = corners.transpose(stored[orientation]) if orientation > 1 else corners
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if format != "PNG" else {}
    picture, facts = open_image(encode(image, format, exif=exif, **options))
    assert (facts.width, facts.height) == picture.size == (48, 32)
    for place, colour in {
        (8, 8): (255, 0, 0),
        (40, 8): (0, 0, 255),
        (8, 24): (0, 128, 0),
        (40, 24): (255, 255, 255),
    }.items():
        found = picture.getpixel(place)
        assert is_near(np.array(found), colour, 12), (place, found)


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert open_image(make_image_bytes("JPEG", exif=exif))[0].size == (32, 24)


def test_broken_exif_costs_nothing() -> None:
    data = make_image_bytes("JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert open_image(data)[0].size == (32, 24)


def transparent(mode: str) -> bytes:
    """Return a PNG whose left half is a half-seen black and whose right half is clear."""
    if mode == "PA":
        image = Image.new("P", (4, 2))
        image.putpalette([0, 0, 0, 9, 9, 9])
        image.paste(1, (2, 0, 4, 2))
        return encode(image, transparency=bytes([128, 0]))
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 128))
    image.paste((9, 9, 9, 0), (2, 0, 4, 2))
    return encode(image.convert(mode))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
@pytest.mark.parametrize(
    ("background", "half", "clear"),
    [("white", 127, 255), ("black", 0, 0), ("#ff0000", (127, 0, 0), (255, 0, 0))],
)
def test_transparency_shows_the_background(
    mode: str, background: str, half: object, clear: object
) -> None:
    found = pixels(transparent(mode), background=background)
    assert is_near(found[:, :2], half)
    assert is_near(found[:, 2:], clear)


@pytest.mark.parametrize(
    ("mode", "value", "transparency"),
    [("L", 7, 7), ("RGB", (1, 2, 3), (1, 2, 3)), ("P", 1, 1), ("1", 0, 0)],
)
@pytest.mark.parametrize("format", ["PNG"])
def test_a_colour_that_stands_for_transparent_is_transparent(
    format: str, mode: str, value: object, transparency: object
) -> None:
    image = Image.new(mode, (4, 2), value)  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette([0, 0, 0, 40, 50, 60])
    found = pixels(encode(image, format, transparency=transparency), background="#00ff00")
    assert is_near(found, (0, 255, 0))


def test_a_transparent_gif_shows_the_background() -> None:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([0, 0, 0, 40, 50, 60])
    assert is_near(pixels(encode(image, "GIF", transparency=1)), 255)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    if format == "AVIF" and "AVIF" not in Image.SAVE:
        pytest.skip("this Pillow has no AVIF")
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert is_near(pixels(data), (255, 0, 0), 6)


def test_an_mpo_is_opened_as_its_first_picture() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green")]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    picture, facts = open_image(data)
    assert facts.format == "JPEG"
    assert is_near(np.asarray(picture).astype(int), (255, 0, 0), 6)


def test_cmyk_is_converted() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # no cyan, all magenta and yellow: red
    for data in (encode(image, "JPEG", quality=100), encode(image, "TIFF")):
        assert is_near(pixels(data), (255, 0, 0), 6)


def test_ycck_as_adobe_writes_it_is_converted() -> None:
    """An Adobe marker with transform 2 says that the four channels are YCCK, inverted."""
    plain = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    adobe = plain.index(b"Adobe")
    assert plain[adobe + 11] == 0
    ycck = plain[: adobe + 11] + b"\x02" + plain[adobe + 12 :]
    picture, _ = open_image(ycck)
    assert picture.size == (16, 16)
    # The bytes 255, 0, 0 read as Y, Cb, Cr are R 76, G 255, B 28 of an inverted picture.
    assert not is_near(np.asarray(picture).astype(int), (255, 0, 0), 40)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pgm = b"P5 8 8 65535\n" + ramp.astype(">u2").tobytes()
    for data in (encode(Image.fromarray(ramp)), encode(Image.fromarray(ramp), "TIFF"), pgm):
        assert is_near(pixels(data)[..., 0], ramp / 257, 1)


def test_twelve_bits_in_a_tiff_are_not_left_dark() -> None:
    ramp = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    assert is_near(pixels(encode(Image.fromarray(ramp), "TIFF"))[..., 0], ramp / 16.06, 1)
    assert pixels(encode(Image.fromarray(ramp), "PNG")).max() == 16


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-10.0, 0.0, 10.0], [0, 128, 255]),
        ([float("nan"), 0.0, 1.0], [0, 0, 255]),
        ([float("inf"), 5.0, 700.0], [0, 0, 255]),
        ([float("nan")] * 3, [0, 0, 0]),
        ([-3e38, 0.0, 3e38], [0, 128, 255]),
        ([-7.0] * 3, [0, 0, 0]),
    ],
)
def test_floats_are_scaled_by_their_range(values: list[float], wanted: list[int]) -> None:
    data = encode(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert is_near(pixels(data)[0, :, 0], wanted, 1)


def test_integers_of_32_bits_are_scaled_by_their_range() -> None:
    data = encode(Image.fromarray(np.array([[-(2**30), 0, 2**30]], np.int32)), "TIFF")
    assert is_near(pixels(data)[0, :, 0], [0, 128, 255], 1)


@pytest.mark.parametrize(
    ("mode", "format"), [("1", "PNG"), ("1", "TIFF"), ("P", "PNG"), ("L", "JPEG")]
)
def test_shallow_pictures_are_converted(mode: str, format: str) -> None:
    assert is_near(pixels(encode(Image.new("L", (9, 9), 255).convert(mode), format)), 255)


def test_lab_is_converted() -> None:
    lab = Image.new("LAB", (4, 4), (255, 128, 128))  # L 100, a 0, b 0: white
    assert is_near(pixels(encode(lab, "TIFF")), 255, 3)


def swapped_profile() -> bytes:
    """Return an RGB profile in which red and blue are exchanged."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for place in range(132, 132 + 12 * struct.unpack(">I", profile[128:132])[0], 12):
        name = bytes(profile[place : place + 4])
        swap = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ", b"desc": b"dEsc"}
        profile[place : place + 4] = swap.get(name, name)
    return bytes(profile)


def test_an_icc_profile_is_converted_to_srgb() -> None:
    red = Image.new("RGB", (4, 4), "red")
    found = pixels(encode(red, icc_profile=swapped_profile()))
    assert is_near(found, (0, 0, 255), 6)
    see_through = red.copy()
    see_through.putalpha(0)
    found = pixels(encode(see_through, icc_profile=swapped_profile()), background="#010203")
    assert is_near(found, (1, 2, 3))


@pytest.mark.parametrize("profile", [b"garbage", b"\0" * 200, bytes(5 << 20)])
@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_a_broken_or_huge_profile_is_ignored(format: str, profile: bytes) -> None:
    if format == "JPEG" and len(profile) > 1 << 20:
        profile = profile[: 1 << 20]
    picture = Image.new("RGB", (4, 4), "red")
    assert is_near(pixels(encode(picture, format, icc_profile=profile)), (255, 0, 0), 6)


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (2, 3)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_extreme_shapes_are_pictures(format: str, size: tuple[int, int]) -> None:
    picture, facts = open_image(encode(Image.new("RGB", size, "teal"), format))
    assert picture.size == (facts.width, facts.height) == size


# --- errors, by code ---


def test_no_bytes_are_empty() -> None:
    assert code_of(b"") == "empty"
    assert facts_of(b"") == ImageFacts()


@pytest.mark.parametrize("data", [b"not a picture", b"\0" * 1000, b"\xff\xd8\xff garbage", b"BM"])
def test_what_is_no_picture_is_unreadable(data: bytes) -> None:
    assert code_of(data) in ("unreadable", "truncated")
    assert facts_of(data).sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "data",
    [
        b"8BPS\0\1" + bytes(50),
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\xd7\xcd\xc6\x9a" + bytes(40),
        b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\xff\x0a" + bytes(20),
        b"\0\0\0\x18ftypmp42" + bytes(20),
    ],
)
def test_pictures_of_other_kinds_are_unsupported(data: bytes) -> None:
    assert code_of(data) == "unsupported"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_cut_picture_is_truncated(format: str, share: float) -> None:
    data = make_image_bytes(format, width=96, height=64)
    assert code_of(data[: int(len(data) * share)]) == "truncated"
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("progressive", [False, True])
def test_a_cut_jpeg_shows_what_it_has_if_that_is_allowed(progressive: bool) -> None:
    data = make_image_bytes("JPEG", width=256, height=192, quality=95, progressive=progressive)
    picture, facts = open_image(data[: len(data) * 2 // 3], ImageSettings(allow_truncated=True))
    assert (facts.width, facts.height) == picture.size == (256, 192)
    assert facts.note.startswith("truncated: ")
    wanted = np.asarray(make_picture(256, 192)).astype(int)
    assert is_near(np.asarray(picture).astype(int)[:32], wanted[:32], 40)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert open_image(data, ImageSettings(allow_truncated=True))[1].note == ""


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
def test_other_cut_pictures_show_the_lines_they_have(format: str) -> None:
    data = make_image_bytes(format, width=256, height=192)
    _, facts = open_image(data[: len(data) * 2 // 3], ImageSettings(allow_truncated=True))
    assert facts.note.startswith("truncated: ")


def test_a_picture_cut_before_its_first_pixel_is_an_error_even_so() -> None:
    data = make_image_bytes("JPEG", width=256, height=192)
    start = data.index(b"\xff\xda") + 14
    assert code_of(data[:start], allow_truncated=True) == "truncated"


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))


def huge(format: str) -> bytes:
    if format == "PNG":
        return png_header(60_000, 60_000)
    if format == "WEBP":
        size = struct.pack("<I", 16_382)[:3]
        body = b"WEBPVP8X" + struct.pack("<II", 10, 0) + size + size + b"VP8L" + bytes(20)
        return b"RIFF" + struct.pack("<I", len(body)) + body
    if format == "GIF":
        gif = make_image_bytes("GIF")
        return gif[:6] + struct.pack("<HH", 65_535, 65_535) + gif[10:]
    if format == "PPM":
        return b"P6 99999 99999 255\n" + bytes(10)
    return b"BM" + bytes(12) + struct.pack("<IiiHHIIIIII", 40, 60000, 60000, 1, 24, *[0] * 6)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "PPM", "BMP"])
def test_a_bomb_is_too_large_and_takes_no_memory(format: str) -> None:
    data = huge(format)
    tracemalloc.start()
    code = code_of(data)
    facts_of(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == "too_large"
    assert peak < 4 << 20


def test_the_pixel_limit_is_exact_and_may_be_raised_above_pillows_own() -> None:
    data = make_image_bytes("PNG", width=20, height=10)
    assert open_image(data, ImageSettings(max_pixels=200))[0].size == (20, 10)
    assert code_of(data, max_pixels=199) == "too_large"
    bomb = png_header(20_000, 20_000)
    assert code_of(bomb) == "too_large"
    assert code_of(bomb, max_pixels=10**9) != "too_large"  # opened, and found to be cut
    assert code_of(bomb) == "too_large"


def test_a_text_chunk_that_unpacks_to_gigabytes_is_an_error_row() -> None:
    text = zlib.compress(bytes(64 << 20), 9)
    body = b"zTXtkey\0\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    data = SEED_FILES["PNG"]
    tracemalloc.start()
    assert code_of(data[:33] + chunk + data[33:]) == "unreadable"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_out_of_memory_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert code_of(SEED_FILES["PPM"]) == "too_large"


@settings(max_examples=400, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8),
    cut=st.floats(0, 1),
    allow_truncated=st.booleans(),
)
def test_no_bytes_bring_more_than_a_sample_error(
    format: str, changes: list[tuple[float, int]], cut: float, allow_truncated: bool
) -> None:
    data = bytearray(SEED_FILES[format])
    for place, value in changes:
        data[int(place * (len(data) - 1))] = value
    if cut < 0.7:
        data = data[: int(len(data) * cut)]
    options = ImageSettings(allow_truncated=allow_truncated, max_pixels=10**7)
    try:
        picture, _ = open_image(bytes(data), options)
    except SampleError as error:
        codes = ("empty", "unreadable", "truncated", "too_large", "unsupported")
        if error.code not in codes:
            raise
    else:
        assert picture.mode == "RGB"
    facts_of(bytes(data))


def test_pillow_warns_nobody_and_other_warnings_stay() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_image(make_image_bytes("TIFF"))
        warnings.warn("still told", stacklevel=1)
        image = Image.new("P", (4, 4))
        image.putpalette([0, 0, 0])
        open_image(encode(image, transparency=b"\0"))
    assert [str(one.message) for one in caught] == ["still told"]


def test_threads_with_different_settings_do_not_disturb_each_other() -> None:
    data = make_image_bytes("JPEG", width=200, height=200, quality=95)
    cut = data[: len(data) // 2]

    def work(i: int) -> str:
        try:
            return open_image(cut, ImageSettings(allow_truncated=i % 2 == 0))[1].note[:9]
        except SampleError as error:
            return error.code

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(40)))
    assert found == ["truncated"] * 40
    assert [code_of(cut)] == ["truncated"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_pixels": 0}, "--max-pixels is 0"), ({"background": "no-colour"}, "--background")],
)
def test_wrong_settings_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ImageSettings(**options)  # type: ignore[arg-type]


def test_no_decoder_talks_past_us_to_the_terminal() -> None:
    """A damaged fax page brought a line a scan line; Pillow's logger one a picture."""
    code = """
import io
from PIL import Image
from pipeline.errors import SampleError
from pipeline.images.opening import open_image
buffer = io.BytesIO()
Image.radial_gradient("L").convert("1").save(buffer, "TIFF", compression="group4")
data = buffer.getvalue()
for place in range(8, len(data) - 400, 50):
    try:
        open_image(data[:place] + b"\\x55\\xaa" * 10 + data[place + 20 :])
    except SampleError:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
