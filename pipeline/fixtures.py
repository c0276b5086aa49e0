"""Made-up shards and pictures, for tests of this package and of programs around it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image


def make_picture(width: int = 32, height: int = 24, *, seed: int = 0) -> Image.Image:
    """Return an RGB picture of smooth colours, another one for each seed."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def make_image_bytes(
    format: str = "JPEG",
    *,
    mode: str = "RGB",
    width: int = 32,
    height: int = 24,
    seed: int = 0,
    **options: Any,
) -> bytes:
    """Return an encoded picture; `options` go to Pillow's writer of that format."""
    buffer = io.BytesIO()
    make_picture(width, height, seed=seed).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


def make_tar_bytes(
    members: Iterable[tuple[str | tarfile.TarInfo, bytes]], *, format: int = tarfile.PAX_FORMAT
) -> bytes:
    """Return a whole tar of `(name, data)`, or of `(TarInfo, data)` for unusual members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_shard(
    path: str | os.PathLike[str], members: Iterable[tuple[str | tarfile.TarInfo, bytes]]
) -> str:
    """Write such a tar to `path`, and return the path."""
    with open(path, "wb") as file:
        file.write(make_tar_bytes(members))
    return os.fspath(path)


def make_photo_shard(path: str | os.PathLike[str], num_samples: int, *, seed: int = 0) -> str:
    """Write a shard of small JPEGs `00000.jpg`, each with a `.txt`, and return its path."""
    return make_shard(
        path,
        [
            member
            for i in range(num_samples)
            for member in (
                (f"{i:05d}.jpg", make_image_bytes(seed=seed + i)),
                (f"{i:05d}.txt", f"picture {i}".encode()),
            )
        ],
    )
