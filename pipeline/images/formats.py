"""Which names and which first bytes mean a picture; nothing here opens one.

A member counts as an image by its extension, whatever its case. A name without any extension
counts as one if its first bytes do. What a picture is opened *as* is decided by its bytes alone,
so that a PNG named `.jpg` works and no exotic decoder is ever reached.
"""

from __future__ import annotations

IMAGE_EXTENSIONS = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "jif", "mpo", "png", "apng", "webp", "gif"),
        *("bmp", "dib", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "ico", "tga"),
        *("jp2", "j2k", "jpf", "jpx", "jpc", "j2c", "avif", "avifs"),
        *("heic", "heics", "heif", "hif"),
    )
)

SNIFF_BYTES = 64

_EXTENSION_OF = {"JPEG": "jpg", "JPEG2000": "jp2", "TIFF": "tif", "HEIF": "heic"}

_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

# Known for what they are, and not opened: they need other programs, or are no photographs.
_FOREIGN = (
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"gimp xcf", "XCF"),
    (b"DDS ", "DDS"),
    (b"icns", "ICNS"),
    (b"\x00\x00\x02\x00", "CUR"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"qoif", "QOI"),
    (b"\x1aE\xdf\xa3", "Matroska video"),
    (b"<svg", "SVG"),
)


def extension_of(name: str) -> str:
    """Return what follows the last dot of a member's base name, in lower case, or ``""``."""
    base = name.rpartition("/")[2]
    stem, dot, extension = base.rpartition(".")
    return extension.lower() if dot and stem else ""


def extension_for(kind: str) -> str:
    """Return the usual extension of a format that `sniff` told."""
    return _EXTENSION_OF.get(kind, kind.lower())


def sniff(data: bytes) -> str:
    """Return the format, in Pillow's words, that the first bytes claim, or ``""``.

    Only formats that captionjob opens are told; `sniff_foreign` knows some of the others.
    """
    for magic, name in (
        (b"\xff\xd8\xff", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
        (b"\xff\x4f\xff\x51", "JPEG2000"),
        (b"II*\x00", "TIFF"),
        (b"MM\x00*", "TIFF"),
        (b"II+\x00", "TIFF"),
        (b"MM\x00+", "TIFF"),
        (b"\x00\x00\x01\x00", "ICO"),
    ):
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _sniff_ftyp(data)
    if data[:2] == b"BM" and data[15:18] == b"\x00\x00\x00" and 12 <= data[14] <= 124:
        return "BMP"
    if data[:1] == b"P" and data[1:2] in b"123456fF" and data[2:3] in (b" ", b"\t", b"\r", b"\n"):
        return "PPM"
    return "TGA" if _is_tga(data) else ""


def sniff_foreign(data: bytes) -> str:
    """Return the name of a picture format that is known but not opened, or ``""``."""
    for magic, name in _FOREIGN:
        if data.startswith(magic):
            return name
    if data[4:8] == b"ftyp" and not sniff(data):
        return "MP4-like video"
    return "SVG" if b"<svg" in data[:1024] else ""


def webp_size(data: bytes) -> tuple[int, int]:
    """Read the canvas size from a WebP header (RFC 9649, section 2.5 to 2.7)."""
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        width, height = data[24:27], data[27:30]
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and len(data) >= 30:
        width, height = data[26:28], data[28:30]
        return (
            int.from_bytes(width, "little") & 0x3FFF,
            int.from_bytes(height, "little") & 0x3FFF,
        )
    return 0, 0


def _sniff_ftyp(data: bytes) -> str:
    """Tell AVIF from HEIF: both are ISO boxes, and both may name `mif1` first."""
    brands = [data[i : i + 4] for i in range(8, min(len(data), SNIFF_BYTES) - 3, 4)]
    if any(brand in _AVIF_BRANDS for brand in brands):
        return "AVIF"
    return "HEIF" if any(brand in _HEIF_BRANDS for brand in brands[:1] + brands[2:]) else ""


def _is_tga(data: bytes) -> bool:
    """TGA has no magic: accept only a header in which every checkable byte is sensible."""
    if len(data) < 18:
        return False
    width, height = data[12] | data[13] << 8, data[14] | data[15] << 8
    is_mapped = data[2] in (1, 9)
    return (
        data[1] == is_mapped
        and data[2] in (1, 2, 3, 9, 10, 11)
        and data[16] in ((8, 16) if is_mapped or data[2] in (3, 11) else (16, 24, 32))
        and data[17] & 0xC0 == 0
        and width > 0
        and height > 0
    )
