"""Any Pillow mode to RGB: orientation, colour profiles, deep pixels, transparency.

| in | out |
|---|---|
| 16-bit grey | 65535 is white; a TIFF that uses 12 bits at most: 4095 is white |
| 32-bit integers, floats | all in 0..1: 1 is white; in 0..255: as they are; integers up to 65535: |
| | as 16 bits; else from the least, black, to the largest, white |
| RGBA, LA, PA, P or L or RGB with a transparent colour | composited on the background |
| CMYK, YCCK (Adobe's inverted ones too), Lab, YCbCr, 1-bit, palettes | converted |
| an ICC profile | converted to sRGB; a broken or absurdly large one is ignored |
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

ORIENTATION = 0x0112  # the EXIF tag
MAX_PROFILE_BYTES = 4 << 20

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PROFILED_MODES = ("RGB", "L", "CMYK", "LAB")


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of a loaded image, 1 to 8; an unreadable EXIF block is 1."""
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # a foreign decoder, on bytes that nobody checked
        return 1
    return orientation if isinstance(orientation, int) and orientation in _UPRIGHT else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn and mirror an image that was stored in one of the eight EXIF orientations."""
    return image if orientation == 1 else image.transpose(_UPRIGHT[orientation])


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Return a loaded image as opaque 8-bit sRGB, as the module's table says."""
    profile = image.info.get("icc_profile")
    image = _flat_mode(image)
    if image.mode == "RGBA":
        alpha = image.getchannel("A")
        picture = Image.new("RGB", image.size, background)
        picture.paste(_to_srgb(image.convert("RGB"), profile), mask=alpha)
        return picture
    return _to_srgb(image, profile)


def _flat_mode(image: Image.Image) -> Image.Image:
    """Bring palettes, transparency of all kinds and deep pixels to L, RGB, RGBA, CMYK or LAB."""
    mode = image.mode
    if mode.startswith(("I", "F")):
        return _grey_of_deep(image)
    if "transparency" in image.info and mode in ("1", "L", "RGB", "P"):
        return image.convert("RGBA")
    if mode in ("La", "RGBa"):
        return image.convert("LA" if mode == "La" else "RGBA").convert("RGBA")
    has_alpha = mode == "P" and image.palette is not None and image.palette.mode == "RGBA"
    if has_alpha or mode in ("LA", "PA", "RGBA"):
        return image.convert("RGBA")
    return image if mode in _PROFILED_MODES else image.convert("RGB")


def _grey_of_deep(image: Image.Image) -> Image.Image:
    """Scale more than 8 bits to grey."""
    values = np.asarray(image).astype(np.float32)
    has_sixteen = image.mode == "I" and image.format in ("PNG", "PPM")  # as some Pillows say it
    if has_sixteen or image.mode.startswith("I;16"):
        is_twelve = image.format == "TIFF" and float(values.max()) <= 4095
        values *= np.float32(255 / (4095 if is_twelve else 65535))
    else:
        with np.errstate(all="ignore"):
            values = _stretched(values)
    values += np.float32(0.5)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _stretched(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bring 32-bit values to 0..255 by their range; what is no number is black."""
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros_like(values)
    low, high = float(values[finite].min()), float(values[finite].max())
    values = np.where(finite, values, np.float32(low))
    if low >= 0 and high <= 255:
        values *= np.float32(255 if high <= 1 else 1)
    elif low >= 0 and 4095 < high <= 65535:
        values *= np.float32(255 / 65535)
    elif low == high:
        values *= np.float32(0)
    else:  # halves, since the range of two floats need not be one
        values *= np.float32(0.5)
        values -= np.float32(low / 2)
        values *= np.float32(255 / (high / 2 - low / 2))
        values = np.nan_to_num(values)
    return values


def _to_srgb(image: Image.Image, profile: object) -> Image.Image:
    """Convert L, RGB, CMYK or LAB to sRGB by its profile, or without one."""
    if image.mode == "LAB":
        return _through(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if isinstance(profile, bytes) and 0 < len(profile) <= MAX_PROFILE_BYTES:
        try:
            source = ImageCms.getOpenProfile(io.BytesIO(profile))
            if not (image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source)):
                return _through(image, source)
        except Exception:  # a foreign parser; a picture is more than its profile
            pass
    return image.convert("RGB")


def _through(image: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    converted = ImageCms.profileToProfile(
        image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert converted is not None
    return converted
