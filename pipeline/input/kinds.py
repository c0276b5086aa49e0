"""Which files are shards, by their names, and which of a folder's files are taken for them."""

from __future__ import annotations

import os

from pipeline.errors import RequestError
from pipeline.images.formats import IMAGE_EXTENSIONS, extension_of
from pipeline.input.ordering import natural_key

SHARD_SUFFIXES = (
    *(".tar", ".tgz", ".tbz2", ".txz", ".tzst"),
    *(".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.zstd"),
)
TABLE_SUFFIXES = (".parquet", ".pq", ".parq")


def is_tar_name(name: str) -> bool:
    """Whether a file's name is that of a tar, and no dot file's."""
    return name.lower().endswith(SHARD_SUFFIXES) and not name.startswith(".")


def is_table_name(name: str) -> bool:
    """Whether a file's name is that of a Parquet file with rows, and no dot file's."""
    return name.lower().endswith(TABLE_SUFFIXES) and not name.startswith((".", "_"))


def is_picture_name(name: str) -> bool:
    """Whether a file's name is that of a picture, and no dot file's."""
    return extension_of(name) in IMAGE_EXTENSIONS and not name.startswith(".")


def no_picture(path: str, pattern: str) -> str:
    """Return the path; RequestError for a picture, which is no shard by itself."""
    if extension_of(path) in IMAGE_EXTENSIONS:
        raise RequestError(
            f"--shards {pattern!r}: {path} is a picture, and no shard; "
            "wanted its folder, a tar or a Parquet file"
        )
    return path


def shards_in(folder: str, pattern: str) -> list[str]:
    """Return the shards that lie in a folder itself: tars, else Parquet files, else the folder.

    img2dataset and others put a Parquet file of metadata beside each tar, so that tars come
    first; `left_aside` tells what was not taken.
    """
    tars, tables, _ = _sorted_out(folder, pattern)
    return sorted(tars or tables or [folder], key=natural_key)


def left_aside(folder: str, pattern: str) -> str:
    """Say what lies in a folder and was not taken, because other shards were; or ``""``."""
    tars, tables, pictures = _sorted_out(folder, pattern)
    others = [("Parquet files", tables if tars else []), ("pictures", pictures)]
    counts = [f"{len(found)} {what}" for what, found in others if found]
    if not counts or not (tars or tables):
        return ""
    kind = "tars" if tars else "Parquet files"
    return f"{pattern} has {kind}; {' and '.join(counts)} beside them are left aside"


def _sorted_out(folder: str, pattern: str) -> tuple[list[str], list[str], list[str]]:
    """Return a folder's own tars, Parquet files and pictures."""
    found: tuple[list[str], list[str], list[str]] = ([], [], [])
    try:
        for entry in os.scandir(folder):
            kinds = (
                is_tar_name(entry.name),
                is_table_name(entry.name),
                is_picture_name(entry.name),
            )
            if any(kinds) and entry.is_file():
                found[kinds.index(True)].append(entry.path)
    except OSError as error:
        raise RequestError(f"--shards {pattern!r}: {error.strerror or error}") from error
    return found
