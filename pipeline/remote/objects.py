"""The seam to any store: an object that tells its version, and gives that version's bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol

from pipeline.errors import RequestError
from pipeline.remote.addresses import scheme_of
from pipeline.remote.patience import Patience


@dataclass(frozen=True, slots=True)
class Version:
    """What tells an object from one that replaced it, as far as its store says."""

    size: int | None = None  # None: not told before its end
    etag: str = ""
    modified: str = ""  # an HTTP date, where there is no etag

    @property
    def stamp(self) -> tuple[int, int]:
        """Two numbers for an identity, as size and time of change are a file's."""
        if self.etag:
            digest = hashlib.sha256(self.etag.encode()).digest()
            return self.size or 0, int.from_bytes(digest[:7], "big")
        try:
            seconds = parsedate_to_datetime(self.modified).timestamp() if self.modified else 0.0
        except ValueError:
            seconds = 0.0
        return self.size or 0, int(seconds) * 10**9

    def is_other(self, found: Version) -> bool:
        """True if what was `found` with an answer is surely another version."""
        pairs = (
            (self.size, found.size),
            (self.etag.removeprefix("W/"), found.etag.removeprefix("W/")),
            (self.modified, found.modified),
        )
        return any(mine and theirs and mine != theirs for mine, theirs in pairs)


class Body(Protocol):
    """Bytes on their way."""

    def read(self, max_bytes: int) -> bytes:
        """Return the next bytes, ``b""`` only at the end; RemoteError where they do not come."""

    def close(self) -> None:
        """Let the connection go; nothing is raised."""


class RemoteObject(Protocol):
    """One object in a store. Its methods make one request each, and raise RemoteError."""

    @property
    def url(self) -> str:
        """Its address as it may be shown."""

    def look(self) -> Version:
        """Ask for its version now."""

    def open(self, offset: int, end: int | None, version: Version) -> Body:
        """Begin to fetch the bytes from `offset` up to `end` (None: all) of just this version."""


def object_at(url: str, patience: Patience | None = None) -> RemoteObject:
    """Return the object that a full url names; RequestError where its extra is not installed."""
    patience = patience or Patience.from_environment()
    scheme = scheme_of(url)
    if scheme == "s3":
        from pipeline.remote.s3_object import S3Object

        return S3Object.at(url)
    if scheme in ("http", "https"):
        from pipeline.remote.http_object import HttpObject

        return HttpObject.at(url, patience)
    if scheme in ("gs", "gcs", "hf"):
        from pipeline.remote.filesystem_object import FilesystemObject

        return FilesystemObject.at(url, patience)
    raise RequestError(f"{scheme}:// is not supported")
