"""A folder of pictures read as it lies: parts of about a thousand pictures are its shards.

    photos/ a.jpg a.txt … │ k.jpg … │ 2024/c.jpg …      a part ends behind a picture whose path
            part 1        │ part 2  │ part 3            has a certain hash: nothing else decides

So a picture that is added, changed or taken away changes its own part and seldom a neighbour: how
many pictures come before says nothing about where a part ends. A part is named after the picture
that the part before ended with. What it was made from is told by the names, sizes,
heads and tails of its files; a change among them makes it another one, as with a tar.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import RequestError, SampleError, ShardError
from pipeline.images.formats import IMAGE_EXTENSIONS, extension_of
from pipeline.input.folder import Findings, walk_pictures
from pipeline.input.shards import shard_id
from pipeline.records import Sample, SampleRef, Shard

if TYPE_CHECKING:
    from pipeline.input.reader import ReaderSettings, ShardStats

MIN_PART = 500  # pictures; a part grows on until a hash ends it, by 500 more on average
MAX_PART = 2000
ODDS = 500  # one hash in so many ends a part
EDGE_BYTES = 1 << 12  # of the head and of the tail of a file, that tell it from another
PART_DIGITS = 10

# What is wrong with one file alone. All else is the file system's fault, and costs the shard.
_OF_THE_FILE = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def picture_shards(folder: str) -> list[Shard]:
    """Return the parts of a folder and the folders below it; RequestError if it has no picture."""
    folder = os.path.abspath(folder)
    findings = Findings()
    parts = list(_parts(walk_pictures(Path(folder), findings)))
    if findings.unreadable:
        path, reason = findings.unreadable[0]
        raise RequestError(f"--shards: {path}: {reason}")
    if not parts:
        raise RequestError(
            f"--shards: {folder} is a folder with no tar, Parquet file or picture in it; "
            "for tars in folders below give '**/*.tar'"
        )
    if findings.skipped["tar"]:
        raise RequestError(
            f"--shards: {folder} has pictures and {findings.skipped['tar']} tars in folders below; "
            "give '**/*.tar' for these, or a folder that has pictures alone"
        )
    whole = shard_id(folder)
    shards, before = [], ""
    for pictures in parts:
        is_first = not before
        digest = hashlib.sha256(os.fsencode(before)).hexdigest()[:PART_DIGITS]
        shards.append(
            Shard(
                id=whole if is_first else f"{whole}-{digest}",
                url=folder if is_first else f"{folder}#{pictures[0][0]}",
                size=sum(_stat(folder, path)[0] for one in pictures for path in one),
                folder=folder,
                pictures=pictures,
            )
        )
        before = pictures[-1][0]
    return shards


def stale_parts(names: Iterable[str], shards: Sequence[Shard]) -> list[str]:
    """Return which of an output's names are parts that their folder is no longer divided into."""
    folders = {shard_id(shard.folder) for shard in shards if shard.folder is not None}
    now = {shard.id for shard in shards}
    found = []
    for name in names:
        stem = name.removesuffix(".parquet")
        part = re.fullmatch(rf"(.+)-[0-9a-f]{{{PART_DIGITS}}}", stem)
        if part is not None and part[1] in folders and stem not in now:
            found.append(name)
    return found


def read_pictures(
    shard: Shard, settings: ReaderSettings, skip: Container[int], stats: ShardStats
) -> Iterator[Sample]:
    """Yield a part's pictures as samples, all but those whose index is in `skip`.

    A picture that is gone or may not be read is a sample with a fault. Raises ShardError where
    the file system fails.
    """
    assert shard.pictures is not None
    for index, (path, *fields) in enumerate(shard.pictures):
        stats.num_images += 1
        if index in skip:
            stats.num_skipped += 1
            stats.note_place((shard.size or 0) * (index + 1) // len(shard.pictures))
            continue
        found = _read(shard, path, settings.max_member_bytes)
        data, fault = (found, None) if isinstance(found, bytes) else (b"", found)
        stats.bytes_read += len(data)
        stats.num_samples += 1
        ref = SampleRef(shard.id, index, _key(path), path)
        yield Sample(ref, data, _fields(shard, fields, settings, stats), fault)


def stamp_of_pictures(shard: Shard) -> tuple[int, int]:
    """Return the bytes of a part, and a number that any file's size or time of change changes."""
    num_bytes, digest = 0, hashlib.sha256()
    for path in _files(shard):
        size, mtime_ns = _stat(shard.folder, path)
        num_bytes += size
        digest.update(f"{path}\0{size}\0{mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return num_bytes, int.from_bytes(digest.digest()[:7], "big")


def digest_of_pictures(shard: Shard) -> str:
    """Return the hash of a part's names, sizes, heads and tails."""
    digest = hashlib.sha256()
    for path in _files(shard):
        size, _ = _stat(shard.folder, path)
        digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))
        try:
            with open(_place(shard.folder, path), "rb") as file:
                digest.update(file.read(EDGE_BYTES))
                file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
                digest.update(file.read(EDGE_BYTES))
        except OSError as error:
            _raise_if_grave(shard, path, error)
    return digest.hexdigest()


def _parts(pictures: Iterator[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Divide pictures in order; names beside each other with one stem are not torn apart."""
    part: list[tuple[str, ...]] = []
    is_over = False
    for one in pictures:
        if part and is_over and _key(part[-1][0]) != _key(one[0]):
            yield tuple(part)
            part, is_over = [], False
        part.append(one)
        is_over = is_over or len(part) >= MAX_PART or (len(part) >= MIN_PART and _ends(one[0]))
    if part:
        yield tuple(part)


def _ends(path: str) -> bool:
    digest = hashlib.sha256(os.fsencode(path)).digest()
    return int.from_bytes(digest[:8], "big") % ODDS == 0


def _key(path: str) -> str:
    """Return a path without its last extension, as a tar's reader does."""
    return path.rpartition(".")[0] if extension_of(path) in IMAGE_EXTENSIONS else path


def _files(shard: Shard) -> Iterator[str]:
    assert shard.pictures is not None
    return (path for one in shard.pictures for path in one)


def _place(folder: str | None, path: str) -> str:
    assert folder is not None
    return os.path.join(folder, path)


def _stat(folder: str | None, path: str) -> tuple[int, int]:
    """Return size and time of change in nanoseconds; of what is no file or is gone, zeros."""
    try:
        status = os.stat(_place(folder, path))
    except OSError:
        return 0, 0
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else (0, 0)


def _read(shard: Shard, path: str, max_bytes: int) -> bytes | SampleError:
    """Return a file's bytes, or what is wrong with it."""
    place = _place(shard.folder, path)
    try:
        status = os.stat(place)
        if not stat.S_ISREG(status.st_mode):
            return SampleError("unreadable", "not a regular file")
        if status.st_size > max_bytes:
            return SampleError("too_large", f"{status.st_size} bytes, the limit is {max_bytes}")
        with open(place, "rb") as file:
            return file.read(max_bytes)
    except MemoryError:
        return SampleError("too_large", "no memory for its bytes")
    except OSError as error:
        _raise_if_grave(shard, path, error)
        return SampleError("unreadable", f"cannot be opened: {error.strerror or error}")


def _raise_if_grave(shard: Shard, path: str, error: OSError) -> None:
    if error.errno not in _OF_THE_FILE:
        raise ShardError(shard.url, f"{path}: {error.strerror or error}") from error


def _fields(
    shard: Shard, paths: Sequence[str], settings: ReaderSettings, stats: ShardStats
) -> dict[str, bytes]:
    fields = {}
    for path in paths:
        name = extension_of(path)
        if settings.fields is not None and name not in settings.fields:
            continue
        found = _read(shard, path, settings.max_field_bytes)
        if isinstance(found, bytes):
            stats.bytes_read += len(found)
            fields[name] = found
        else:
            stats.junk[f"field: {found.code}"] += 1
    return fields
