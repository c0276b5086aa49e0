"""Whether bytes that a decoder gave up on end before their own format says so.

Some decoders say only "error -2". A format that states its own length, or where its data lies,
settles whether the file was cut, which is another fault than a damaged one.
"""

from __future__ import annotations

import struct

from pipeline.images.formats import sniff

MAX_ENTRIES = 4096


def ends_early(data: bytes) -> bool:
    """Whether the format's own lengths and offsets point behind the end of `data`."""
    try:
        match sniff(data):
            case "WEBP":
                return len(data) < int.from_bytes(data[4:8], "little") + 8
            case "AVIF" | "HEIF":
                return _boxes_end(data) > len(data)
            case "JPEG2000":
                return not data.rstrip(b"\0").endswith(b"\xff\xd9")  # end of codestream
            case "TIFF":
                return _tiff_end(data) > len(data)
            case "ICO":
                return _icons_end(data) > len(data)
    except struct.error:
        return True  # the structure itself is cut
    return False


def _boxes_end(data: bytes) -> int:
    """Walk the outermost boxes of an ISO file (ISO 14496-12): 4 bytes of size, 4 of kind."""
    place = 0
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        if size == 0:  # up to the end of the file
            return len(data)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, place + 8)
        place += max(size, 8)
    return place


def _tiff_end(data: bytes) -> int:
    """Return where the last strip or tile of a TIFF's first picture ends (TIFF 6.0, section 2)."""
    order = "<" if data[:2] == b"II" else ">"
    if data[2:4] != struct.pack(f"{order}H", 42):
        return 0  # BigTIFF: not looked into
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, start)
    values: dict[int, tuple[int, ...]] = {}
    for i in range(min(count, MAX_ENTRIES)):
        tag, kind, number, offset = struct.unpack_from(f"{order}HHII", data, start + 2 + 12 * i)
        if tag not in (273, 279, 324, 325) or kind not in (3, 4):  # strips, tiles; SHORT, LONG
            continue
        letter, width = ("H", 2) if kind == 3 else ("I", 4)
        place = start + 2 + 12 * i + 8 if number * width <= 4 else offset
        if place + number * width > len(data):
            return int(place + number * width)
        values[tag] = struct.unpack_from(f"{order}{number}{letter}", data, place)
    ends = [
        int(offset + size)
        for offsets, sizes in ((273, 279), (324, 325))
        for offset, size in zip(values.get(offsets, ()), values.get(sizes, ()), strict=False)
    ]
    return max(ends, default=0)


def _icons_end(data: bytes) -> int:
    """Return where the last picture of an icon file ends."""
    (count,) = struct.unpack_from("<H", data, 4)
    entries = (struct.unpack_from("<II", data, 6 + 16 * i + 8) for i in range(count))
    return max((size + offset for size, offset in entries), default=0)
