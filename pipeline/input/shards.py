"""Which shards are asked for, and what each is called.

Local paths are opened, objects in stores, and commands where the user allows them; `open_shard` is
the one door. A command is run only for a Shard that `expand_shards` made of the user's own words,
never for a url that stood in a file. Of a remote shard `url` is what may be shown: a password or a
signature is in its `address` alone.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import BinaryIO, cast
from urllib.parse import unquote, urlsplit

from braceexpand import braceexpand

from pipeline.errors import RequestError, ShardError
from pipeline.input.kinds import (
    SHARD_SUFFIXES,
    TABLE_SUFFIXES,
    is_table_name,
    is_tar_name,
    no_picture,
    shards_in,
)
from pipeline.input.kinds import left_aside as left_aside_in
from pipeline.input.ordering import natural_key as natural_key
from pipeline.input.pipes import is_pipe, open_pipe, words_of
from pipeline.records import Columns, Shard
from pipeline.remote.addresses import SCHEMES, WEB_SCHEMES, is_remote, scheme_of, shown
from pipeline.remote.listing import list_objects
from pipeline.remote.reader import Note, open_remote

MAX_SHARDS = 1_000_000  # of one pattern: {0..999999999999} must not eat the memory

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://|(pipe):")
_RANGE = re.compile(r"\{(-?[0-9]{1,30})\.\.(-?[0-9]{1,30})")


def expand_shards(patterns: Sequence[str], *, allow_pipe: bool = False) -> list[Shard]:
    """Return the shards that paths, folders, globs and braces stand for, each once.

    The order is the one given; a glob's and a folder's files come in natural order (2 before
    10). Raises RequestError, naming the pattern, where one stands for nothing or for a file
    that is not there.
    """
    if not patterns:
        raise RequestError("no --shards given; for example --shards 'shards/{00000..00099}.tar'")
    found: dict[str, Shard] = {}
    for pattern in patterns:
        if is_pipe(pattern):
            commands = _pipes(pattern, allow_pipe=allow_pipe)
            found.update((shard.url, shard) for shard in commands if shard.url not in found)
            continue
        if is_remote(pattern):
            for name, shard in _remote(pattern):
                found.setdefault(name, shard)
            continue
        for path in map(os.path.abspath, _expand(pattern)):
            if path not in found:
                found |= {one.url: one for one in _shards_at(path)}
    shards = list(found.values())
    seen: dict[str, Shard] = {}
    for shard in shards:
        if seen.setdefault(shard.id, shard) is not shard:
            raise RequestError(
                f"{shard.url} and {seen[shard.id].url} would share the name {shard.id}; rename one"
            )
    return shards


def with_columns(shards: Iterable[Shard], columns: Columns) -> list[Shard]:
    """Return the shards, the Parquet files among them to be read by these columns."""
    return [replace(one, columns=columns) if is_table(one) else one for one in shards]


def is_table(shard: Shard) -> bool:
    """Whether a shard is a Parquet file, by its name."""
    is_file = shard.command is None and shard.pictures is None
    return is_file and shard.url.partition("?")[0].lower().endswith(TABLE_SUFFIXES)


def left_aside(patterns: Sequence[str]) -> list[str]:
    """Say of each local folder what lies there and was not taken, because other shards were."""
    local = [one for one in patterns if not (is_pipe(one) or is_remote(one))]
    folders = [(local_path(pattern), pattern) for pattern in local]
    found = [left_aside_in(path, pattern) for path, pattern in folders if os.path.isdir(path)]
    return [line for line in found if line]


def shard_id(path: str) -> str:
    """Return a shard's file-system-safe name: its base name, and 8 hex digits of its full path.

    The digits are always there, so that the name depends on nothing but the path: not on
    which other shards this run was given, nor on the folder it was started in. Two shards of
    the same base name in different folders so never share an output. A moved shard is another
    shard. Links are not resolved: the name that the user sees is the one that counts.
    """
    path = os.path.abspath(path)
    return _id(os.path.basename(path), path)


def _id(base: str, whole: str) -> str:
    for suffix in sorted((*SHARD_SUFFIXES, *TABLE_SUFFIXES), key=len, reverse=True):
        if base.lower().endswith(suffix):
            base = base[: -len(suffix)]
            break
    # Readers of the output folder skip names that begin with `_` or `.`.
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", base).lstrip("._-")[:100] or "shard"
    digest = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}-{digest}"


def open_shard(
    shard: Shard, *, stamp: tuple[int, int] | None = None, note: Note | None = None
) -> BinaryIO:
    """Open a shard's bytes, unbuffered, from the start; ShardError where that cannot be done.

    A remote shard must have this `stamp`, if one is given; `note` is told of each failure of a
    connection that is made anew.
    """
    if shard.command is not None:
        return open_pipe(shard.command, shard.url)
    if is_remote(shard.url):
        return cast(BinaryIO, open_remote(shard.address or shard.url, stamp=stamp, note=note))
    try:
        return cast(BinaryIO, open(local_path(shard.url), "rb", buffering=0))
    except OSError as error:
        raise ShardError(shard.url, f"cannot be opened: {error.strerror or error}") from error


def local_path(url: str) -> str:
    """Return the path that a url or path names; RequestError for a scheme that is not known."""
    match = _SCHEME.match(url)
    if match is None:
        return os.path.expanduser(url)
    scheme = (match[1] or match[2]).lower()
    if scheme == "file":
        return unquote(urlsplit(url).path)
    if scheme == "pipe":
        raise RequestError(f"{url!r} would run a command, and is refused here")
    raise RequestError(
        f"--shards {shown(url)!r}: {scheme}:// is not supported; "
        f"wanted a path, or one of {', '.join(SCHEMES)}"
    )


def _expand(pattern: str) -> Iterator[str]:
    """Yield the files that one pattern stands for."""
    if not pattern.strip():
        raise RequestError("--shards '' is empty; wanted a tar, a folder or a pattern")
    path = local_path(pattern)
    if os.path.isfile(path):  # also names that really hold braces or stars
        yield no_picture(path, pattern)
        return
    if os.path.isdir(path):
        yield from shards_in(path, pattern)
        return
    expanded = _braces(path, pattern)
    missing: list[str] = []
    for one in expanded:
        if os.path.isfile(one):
            yield no_picture(one, pattern)
        elif glob.has_magic(one):
            found = [name for name in glob.iglob(one, recursive=True) if os.path.isfile(name)]
            if not found:
                missing.append(one)
            yield from sorted((no_picture(name, pattern) for name in found), key=natural_key)
        elif os.path.isdir(one):
            yield from shards_in(one, pattern)
        else:
            missing.append(one)
    if missing:
        raise RequestError(_missing_message(pattern, missing, len(expanded)))


def _remote(pattern: str) -> Iterator[tuple[str, Shard]]:
    """Yield the shards in a store that one pattern stands for, with the name that each goes by."""
    kinds = (is_tar_name, is_table_name)  # of a folder, as `kinds.shards_in` has it of a local one
    for one in list_objects(pattern, _braces(pattern, shown(pattern)), kinds):
        address, version = one.address, one.version
        path = urlsplit(address.shown).path if scheme_of(pattern) in WEB_SCHEMES else address.shown
        yield (
            address.name,
            Shard(
                _id(unquote(os.path.basename(path.rstrip("/"))), address.name),
                address.shown,
                None if version is None else version.size,
                address=address.full if address.has_more_than_it_shows else None,
                stamp=None if version is None else version.stamp,
            ),
        )


def _shards_at(path: str) -> list[Shard]:
    """Return the shard of a file, or the parts of a folder of pictures."""
    if not os.path.isdir(path):
        return [Shard(shard_id(path), path, os.path.getsize(path))]
    from pipeline.input.pictures import picture_shards  # which needs what is here

    return picture_shards(path)


def _pipes(pattern: str, *, allow_pipe: bool) -> Iterator[Shard]:
    """Yield the shards that a `pipe:` pattern stands for, one a command."""
    if not allow_pipe:
        raise RequestError(
            f"--shards {pattern!r} would run a command; give --allow-pipe if that is meant"
        )
    for url in _braces(pattern, pattern):
        words = words_of(url)
        yield Shard(_id(os.path.basename(words[-1].rstrip("/")), url), url, command=words)


def _missing_message(pattern: str, missing: Sequence[str], wanted: int) -> str:
    if wanted == 1:
        what = "matches no file" if glob.has_magic(missing[0]) else "does not exist"
        if os.path.exists(missing[0]):
            what = "is not a file"
        return f"--shards {pattern!r} {what}"
    first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"--shards {pattern!r}: {len(missing)} of {wanted} files are missing: {first}"


def _braces(path: str, pattern: str) -> list[str]:
    for first, last in _RANGE.findall(path):  # braceexpand would build such a range in memory
        if abs(int(first) - int(last)) >= MAX_SHARDS:
            raise RequestError(f"--shards {pattern!r} stands for more than {MAX_SHARDS} files")
    try:
        expanded = list(islice(braceexpand(path, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise RequestError(f"--shards {pattern!r} has a brace with no partner") from None
    if len(expanded) > MAX_SHARDS:
        raise RequestError(f"--shards {pattern!r} stands for more than {MAX_SHARDS} files")
    return expanded
