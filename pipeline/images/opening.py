"""Untrusted bytes to an upright RGB picture, or a SampleError with a stable code.

    empty        no bytes at all
    unreadable   no picture, or one that its decoder gives up on
    truncated    a picture whose data ends too early
    too_large    more pixels than the limit, by its header: no pixel memory is taken
    unsupported  a picture of a kind that is not opened here (HEIC without plug-in, PSD, PDF)

A picture is opened by the one decoder that its first bytes name. All of it is decoded; nothing
that is missing is filled with grey unless `allow_truncated` asks for that. What comes out is
upright (EXIF orientation applied), in sRGB (ICC applied), opaque (on `background`) and 8 bits
deep; of an animation the first frame. `pipeline.images.colours` has the rules for the pixels.

Pillow's global switches stay as they are, with two exceptions, both safe between threads: its
warnings and libtiff's messages are silenced once pictures are opened here, for each is told as an
error or a note; and its own pixel limit is raised, never lowered, if `max_pixels` is above it.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass

from PIL import Image, ImageColor, ImageFile, UnidentifiedImageError

from pipeline.errors import RequestError, SampleError
from pipeline.images.colours import orientation_of, to_rgb, upright
from pipeline.images.decoders import prepare_pillow, register_formats
from pipeline.images.formats import sniff, sniff_foreign, webp_size
from pipeline.images.pixel_room import Claim, bytes_to_open, claim_nothing
from pipeline.images.truncation import ends_early
from pipeline.records import ImageFacts, Sample

MAX_PIXELS = 178_956_970  # Pillow's own: half a GiB of RGB
MAX_DETAIL = 200
WEBP_CANVAS_BYTES = 8  # for each pixel: the frame and the one before, in RGBA
MIN_SHOWN = 0.02  # of a cut picture: less is nothing to caption

# What decoders say, in many words, of data that ends too early.
_CUT = re.compile(r"truncat|not enough|premature|incomplete|unexpected end|eof", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How pictures are opened; these shape captions."""

    max_pixels: int = MAX_PIXELS
    background: str = "white"  # a name or #rrggbb, under what is transparent
    allow_truncated: bool = False

    def __post_init__(self) -> None:
        if self.max_pixels < 1:
            raise RequestError(f"--max-pixels is {self.max_pixels}; wanted 1 or more")
        try:
            ImageColor.getrgb(self.background)
        except ValueError:
            raise RequestError(
                f"--background is {self.background!r}; wanted a colour such as white or #808080"
            ) from None

    @property
    def background_rgb(self) -> tuple[int, int, int]:
        """The background as red, green and blue, 0 to 255."""
        red, green, blue, *_ = ImageColor.getrgb(self.background)
        return red, green, blue


def open_sample(
    sample: Sample, settings: ImageSettings | None = None, claim: Claim = claim_nothing
) -> tuple[Image.Image, ImageFacts]:
    """Open a sample's image as `open_image` does; a fault that the reader found is raised."""
    if sample.fault is not None:
        raise sample.fault
    return open_image(sample.data, settings, claim)


def open_image(
    data: bytes, settings: ImageSettings | None = None, claim: Claim = claim_nothing
) -> tuple[Image.Image, ImageFacts]:
    """Return the picture that the bytes hold, in RGB, and what they say of themselves.

    `claim` is told how many bytes the pixels will take, before any of them is taken. Raises
    SampleError, whatever the bytes; safe on any number of threads.
    """
    settings = settings or ImageSettings()
    if not data:
        raise SampleError("empty", "the member holds no bytes")
    prepare_pillow(settings.max_pixels)
    try:
        image, note = _decode(data, settings, claim)
        picture = upright(to_rgb(image, settings.background_rgb), orientation_of(image))
    except SampleError:
        raise
    except Image.DecompressionBombError as error:
        raise SampleError("too_large", _detail(error)) from None
    except MemoryError:
        raise SampleError("too_large", "opening it ran out of memory") from None
    except Exception as error:  # a foreign decoder, fed with anything, may raise anything
        raise _sample_error(error, data) from None
    facts = ImageFacts(
        width=picture.width,
        height=picture.height,
        format=sniff(data),
        sha256=hashlib.sha256(data).hexdigest(),
        note=note,
    )
    return picture, facts


def facts_of(data: bytes) -> ImageFacts:
    """Return what can be said of bytes that could not be opened; it never raises.

    Width and height are as the header has them, 0 where there is none.
    """
    if not data:
        return ImageFacts()
    width = height = 0
    prepare_pillow(0)
    try:
        if sniff(data) == "WEBP":
            width, height = webp_size(data)
        else:
            with _open_header(data, MAX_PIXELS) as image:
                width, height = image.size
    except Exception:  # a foreign decoder; what it cannot say stays 0
        pass
    return ImageFacts(width, height, sniff(data), hashlib.sha256(data).hexdigest())


def _decode(data: bytes, settings: ImageSettings, claim: Claim) -> tuple[Image.Image, str]:
    """Return the picture with its pixels loaded, and a note if some were not there."""
    image = _open_header(data, settings.max_pixels, claim)
    claim(bytes_to_open(image))
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # a foreign decoder, as above
        if not (settings.allow_truncated and (_is_cut(error) or ends_early(data))):
            raise
        partial = _load_partly(image, data, settings.max_pixels)
        if _shown_share(partial) < MIN_SHOWN:
            raise
        return partial, f"truncated: {_detail(error)}"
    _check_size(image.size, settings.max_pixels)  # an icon's real size shows only now
    return image, ""


def _open_header(data: bytes, max_pixels: int, claim: Claim = claim_nothing) -> ImageFile.ImageFile:
    """Open the header alone, with the one decoder that the first bytes name."""
    name = sniff(data)
    if not name:
        foreign = sniff_foreign(data)
        if foreign:
            raise SampleError("unsupported", f"{foreign} is not opened")
        raise SampleError("unreadable", f"not a picture: it begins with {data[:8]!r}")
    if name == "WEBP":  # its decoder takes memory for the canvas as soon as it is made
        size = webp_size(data)
        _check_size(size, max_pixels)
        claim(size[0] * size[1] * WEBP_CANVAS_BYTES)
    register_formats()
    if name not in Image.OPEN:
        hint = ": pip install 'captionjob[heif]'" if name == "HEIF" else " with this Pillow"
        raise SampleError("unsupported", f"{name} cannot be opened here{hint}")
    image = Image.open(io.BytesIO(data), formats=(name,))
    _check_size(image.size, max_pixels)
    assert isinstance(image, ImageFile.ImageFile)
    return image


def _load_partly(image: ImageFile.ImageFile, data: bytes, max_pixels: int) -> Image.Image:
    """Return what a cut picture still shows, without Pillow's global switch for that."""
    if image.format in ("JPEG", "MPO"):
        # With an end marker in place libjpeg shows what it has, also of progressive pictures.
        ended = _open_header(data + b"\xff\xd9", max_pixels)
        try:
            ended.load()
        except Exception:  # a foreign decoder: fall back on the lines that were decoded
            pass
        else:
            return ended
    # The rows that were decoded are there; with no tiles to load, Pillow takes them as loaded.
    image.tile = []
    image.load()
    return image


def _shown_share(image: Image.Image) -> float:
    """Return the share of pixels that are not of the one colour in which a cut picture ends."""
    grey = image.convert("L")
    width, height = grey.size
    last = grey.getpixel((width - 1, height - 1))
    return 1 - grey.histogram()[int(last)] / (width * height)  # type: ignore[arg-type]


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise SampleError(
            "too_large", f"{width} x {height} is {width * height} pixels, the limit {max_pixels}"
        )


def _is_cut(error: Exception) -> bool:
    return isinstance(error, EOFError) or bool(_CUT.search(str(error)))


def _sample_error(error: Exception, data: bytes) -> SampleError:
    code = "truncated" if _is_cut(error) or ends_early(data) else "unreadable"
    if isinstance(error, UnidentifiedImageError):
        return SampleError(code, f"it begins like {sniff(data)}, but its header makes no sense")
    return SampleError(code, _detail(error))


def _detail(error: Exception) -> str:
    """Say an exception in one line, with no address of an object in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:MAX_DETAIL]
