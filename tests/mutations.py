"""Changed picture bytes, as damage and malice change them: bits, numbers, blocks, cuts, splices."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
MAX_BLOCK = 64


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change `data` in one to five ways; `other` is what it may be spliced with."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        rng.choice(MUTATIONS)(rng, changed, other)
        if not changed:
            break
    if changed.startswith(b"\x89PNG") and rng.random() < 0.7:
        return with_right_sums(bytes(changed))
    return bytes(changed)


def _place(rng: random.Random, data: bytearray) -> int:
    """Pick a place, near the head more often, where the structure is."""
    top = len(data) if rng.random() < 0.5 else min(len(data), 128)
    return rng.randrange(top)


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    for _ in range(rng.randint(1, 4)):
        data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _number(rng: random.Random, data: bytearray, other: bytes) -> None:
    width, letter = rng.choice(((1, "B"), (2, "H"), (4, "I")))
    number = rng.choice(NUMBERS) % 256**width
    place = _place(rng, data)
    data[place : place + width] = struct.pack(rng.choice("<>") + letter, number)


def _remove(rng: random.Random, data: bytearray, other: bytes) -> None:
    place = _place(rng, data)
    del data[place : place + rng.randint(1, MAX_BLOCK)]


def _repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    place = _place(rng, data)
    data[place:place] = data[place : place + rng.randint(1, MAX_BLOCK)] * rng.randint(1, 8)


def _zero(rng: random.Random, data: bytearray, other: bytes) -> None:
    place = _place(rng, data)
    size = min(rng.randint(1, MAX_BLOCK), len(data) - place)
    data[place : place + size] = bytes([rng.choice((0, 255))]) * size


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    if other:
        start = rng.randrange(len(other))
        block = other[start : start + rng.choice((8, MAX_BLOCK, 4096))]
        place = _place(rng, data)
        data[place : place + rng.choice((0, len(block)))] = block


def _cut(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data)) :]


Mutation = Callable[[random.Random, bytearray, bytes], None]
MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _flip, _number, _number, _number),
    *(_remove, _repeat, _zero, _splice, _cut),
)


def with_right_sums(data: bytes) -> bytes:
    """Return a PNG whose chunks have the right checksums, so that what is in them is looked at."""
    parts, place = [data[:8]], 8
    while place + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        end = place + 8 + size
        if end + 4 > len(data):
            break
        parts += [data[place:end], struct.pack(">I", zlib.crc32(data[place + 4 : end]))]
        place = end + 4
    return b"".join([*parts, data[place:]])
