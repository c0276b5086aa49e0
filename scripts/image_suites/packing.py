"""A folder of any files becomes shards: pictures by extension, all others without one."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.images.formats import IMAGE_EXTENSIONS, SNIFF_BYTES, extension_of, sniff

MAX_SHARD_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """The files of a suite, and what a reader of its shards must find."""

    files: list[Path]
    shards: list[Path]
    num_rows: int  # files that count as pictures, by their names or first bytes


def pack_suite(name: str, folder: Path, shards_folder: Path) -> Packed:
    """Write the shards of one suite, `NAME-000.tar` and so on."""
    files = sorted(find_files(folder))
    shards: list[Path] = []
    num_rows = 0
    tar: tarfile.TarFile | None = None
    for number, path in enumerate(files):
        if tar is None or tar.offset > MAX_SHARD_BYTES:
            if tar is not None:
                tar.close()
            shards.append(shards_folder / f"{name}-{len(shards):03d}.tar")
            tar = tarfile.open(shards[-1], "w")  # noqa: SIM115  closed below
        member = member_name(number, path)
        tar.add(path, member, recursive=False)
        num_rows += "." in member or bool(sniff(head_of(path)))
    if tar is not None:
        tar.close()
    return Packed(files, shards, num_rows)


def find_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, links left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path


def member_name(number: int, path: Path) -> str:
    """Return a name with the file's extension if it is a picture's, else with none."""
    extension = extension_of(path.name)
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", path.name)
    key = f"{number:06d}-{stem}"
    return f"{key}.{extension}" if extension in IMAGE_EXTENSIONS else key


def head_of(path: Path) -> bytes:
    """Return the bytes that tell a picture."""
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)
