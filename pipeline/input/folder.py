"""The pictures of a folder, and a key for each that any tar reader splits as it was meant.

A picture is known by its extension or, without one, by its first bytes. Dot files and
`__MACOSX` are skipped, as in shards. Links are followed, each real folder once.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.images.formats import (
    IMAGE_EXTENSIONS,
    SNIFF_BYTES,
    extension_for,
    extension_of,
    sniff,
)
from pipeline.input.kinds import is_tar_name
from pipeline.input.ordering import natural_key

FIELD_EXTENSIONS = ("json", "txt")


@dataclass(slots=True)
class Findings:
    """What a folder holds besides pictures."""

    skipped: Counter[str] = field(default_factory=Counter)  # reason -> files
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # path, reason


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture file, its path without the extension, and the fields beside it."""

    path: Path  # relative to the folder
    stem: str
    extension: str
    siblings: tuple[tuple[str, Path], ...]  # field name, path


def find_pictures(folder: Path, findings: Findings) -> list[Picture]:
    """Walk the folder, links included, each real folder once; return pictures in order."""
    found = [one for pictures in _by_folder(folder, findings) for one in pictures]
    return sorted(found, key=lambda picture: natural_key(picture.path.as_posix()))


def walk_pictures(folder: Path, findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield each picture's path and those of its fields, folder by folder: millions fit so."""
    for pictures in _by_folder(folder, findings):
        for one in sorted(pictures, key=lambda picture: natural_key(picture.path.name)):
            yield (one.path.as_posix(), *(path.as_posix() for _, path in one.siblings))


def _by_folder(folder: Path, findings: Findings) -> Iterator[list[Picture]]:
    for parent, names in _walk(folder, findings):
        found: list[Picture] = []
        fields = {
            (name.rpartition(".")[0], extension_of(name)): parent / name
            for name in sorted(names, reverse=True)
            if extension_of(name) in FIELD_EXTENSIONS
        }
        used: set[Path] = set()
        for name in names:
            extension = _image_extension(folder / parent / name, findings)
            if extension:
                stem = name.rpartition(".")[0] if extension_of(name) else name
                siblings = tuple(
                    (one, fields[stem, one]) for one in FIELD_EXTENSIONS if (stem, one) in fields
                )
                used.update(path for _, path in siblings)
                path = parent / name
                found.append(Picture(path, (parent / stem).as_posix(), extension, siblings))
        findings.skipped["no picture"] -= len(used)
        yield found
    findings.skipped = +findings.skipped


def _walk(folder: Path, findings: Findings) -> Iterator[tuple[Path, list[str]]]:
    seen: set[tuple[int, int]] = set()

    def unreadable(error: OSError) -> None:
        findings.unreadable.append((str(error.filename), error.strerror or str(error)))

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:  # a loop of links, or a second way here
            folders.clear()
            findings.skipped["folder seen before"] += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted((one for one in folders if not _is_hidden(one)), key=natural_key)
        hidden = [name for name in names if _is_hidden(name)]
        if hidden:
            findings.skipped["dot file"] += len(hidden)
        yield Path(os.path.relpath(parent, folder)), sorted(set(names) - set(hidden))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _image_extension(path: Path, findings: Findings) -> str:
    """Return a picture's extension in lower case, by its name or first bytes; ``""`` if none."""
    extension = extension_of(path.name)
    if extension in IMAGE_EXTENSIONS:
        return extension
    if not extension and path.is_file():
        try:
            with open(path, "rb") as file:
                kind = sniff(file.read(SNIFF_BYTES))
        except OSError as error:
            findings.unreadable.append((str(path), error.strerror or str(error)))
            return ""
        if kind:
            return extension_for(kind)
    findings.skipped["tar" if is_tar_name(path.name) else "no picture"] += 1
    return ""


def with_keys(pictures: list[Picture]) -> Iterator[tuple[str, Picture]]:
    """Give each picture a key of its own: its path, with no dot that would end the key early."""
    seen: set[str] = set()
    for picture in pictures:
        key = _safe_key(picture.stem)
        if key in seen:
            key = f"{key}-{picture.extension}"
        base, number = key, 2
        while key in seen:
            key, number = f"{base}-{number}", number + 1
        seen.add(key)
        yield key, picture


def _safe_key(path: str) -> str:
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = unicodedata.normalize("NFC", text)
    text = "".join("_" if unicodedata.category(c) in ("Cc", "Cs") or c == "\\" else c for c in text)
    folder, slash, name = text.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}"
