"""Pillow made ready for strange bytes: every decoder known, and none of them talking.

Process-wide, and done once. What a decoder has to say of a picture is in its error row. Unsilenced,
libtiff writes a line to stderr for each damaged *line* of a fax page, past Python and into a bar.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import warnings
from functools import lru_cache

from PIL import Image, _imaging

_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@lru_cache(maxsize=1)
def register_formats() -> None:
    """Let Pillow know all its formats, and HEIF if the plug-in is there; silence decoders."""
    Image.init()
    _silence_libtiff()
    # Without any handler, logging would print Pillow's messages; a program's own still get them.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    try:
        import pillow_heif
    except ImportError:
        return
    pillow_heif.register_heif_opener()


def prepare_pillow(max_pixels: int) -> None:
    """Silence Pillow's warnings (`catch_warnings` is not safe between threads); raise its limit."""
    if _PILLOW_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels


def _silence_libtiff() -> None:
    """Take libtiff's error handler away, through the library that Pillow is linked with."""
    with contextlib.suppress(OSError, AttributeError):  # another linking: then it goes on talking
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)
