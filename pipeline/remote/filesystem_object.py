"""An object in a store that fsspec knows: `gs://` by gcsfs, `hf://` by huggingface_hub.

Their clients differ in how they time out, if they do. So a range is asked for at a time, on a
thread of its own, which is left behind when its time is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pipeline.errors import RequestError
from pipeline.remote.addresses import scheme_of
from pipeline.remote.faults import Kind, RemoteError, fault_of_status
from pipeline.remote.objects import Version
from pipeline.remote.patience import Patience

RANGE_BYTES = 4 << 20
EXTRAS = {"gs": "gs", "gcs": "gs", "hf": "hub"}

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class FilesystemObject:
    """One path of an fsspec file system."""

    url: str
    path: str
    filesystem: Any = field(repr=False)
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def at(cls, url: str, patience: Patience) -> FilesystemObject:
        """Return the object; RequestError where the extra is missing."""
        filesystem = filesystem_for(url)
        return cls(url, str(filesystem._strip_protocol(url)), filesystem, patience)

    def look(self) -> Version:
        """Ask for its details, not those remembered from a listing."""

        def ask() -> dict[str, Any]:
            self.filesystem.invalidate_cache(self.path)
            return dict(self.filesystem.info(self.path))

        details = self.ask(ask)
        if details.get("type") == "directory":
            raise RemoteError("missing", "a folder, wanted a file")
        return version_of(details)

    def open(self, offset: int, end: int | None, version: Version) -> RangeBody:
        """Begin to fetch; the version is checked once the object's last byte has come.

        Clients of these stores know no conditions, and a question costs as much as a range.
        """
        if version.size is None:
            raise RemoteError("refused", "the store does not tell its length")
        return RangeBody(self, version, offset, version.size if end is None else end)

    def check(self, version: Version) -> None:
        """Raise RemoteError unless the version is the one that lies there."""
        if version.is_other(self.look()):
            raise RemoteError("changed", "another version is there")

    def read_range(self, begin: int, end: int) -> bytes:
        """Return these bytes, or RemoteError."""
        data: bytes = self.ask(partial(self.filesystem.cat_file, self.path, start=begin, end=end))
        if len(data) != end - begin:
            raise RemoteError("transient", f"{len(data)} bytes came, wanted {end - begin}")
        return data

    def ask(self, question: Callable[[], Found]) -> Found:
        """Call a foreign client, and wait no longer than a stall may take."""
        answers: list[Found] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:  # a foreign client can raise anything
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience.stall_seconds)
        if answers:
            return answers[0]
        if errors:
            raise fault_of(errors[0]) from None
        raise RemoteError("transient", "the store stalled")


class RangeBody:
    """Bytes in ranges, each asked for when the one before is used up."""

    def __init__(self, remote: FilesystemObject, version: Version, begin: int, end: int) -> None:
        """Give the bytes from `begin` to `end`."""
        self._remote = remote
        self._version = version
        self._begin = begin
        self._end = end
        self._data = memoryview(b"")

    def read(self, max_bytes: int) -> bytes:
        """Return the next bytes."""
        if not self._data and self._begin < self._end:
            end = min(self._end, self._begin + RANGE_BYTES)
            self._data = memoryview(self._remote.read_range(self._begin, end))
            self._begin = end
            if end == self._version.size:
                self._remote.check(self._version)
        data, self._data = self._data[:max_bytes], self._data[max_bytes:]
        return bytes(data)

    def close(self) -> None:
        """Do nothing: no connection is held."""


def filesystem_for(url: str) -> Any:
    """Return the file system of a url's scheme; RequestError where its extra is missing."""
    scheme = scheme_of(url)
    extra = EXTRAS.get(scheme, "hub")
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError:
        raise RequestError(f"{scheme}:// needs: pip install 'captionjob[{extra}]'") from None


def version_of(details: dict[str, Any]) -> Version:
    """Return the version that an entry tells, by whatever name its store has for it."""
    etag = next(
        (
            str(details[name])
            for name in ("etag", "ETag", "generation", "blob_id", "md5Hash", "checksum")
            if details.get(name)
        ),
        "",
    )
    modified = next(
        (str(details[name]) for name in ("updated", "mtime", "created") if details.get(name)), ""
    )
    size = details.get("size")
    return Version(None if size is None else int(size), etag or modified)


def fault_of(error: Exception) -> RemoteError:
    """Return what a foreign client's error means, by its class or by the status it carries."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, FileNotFoundError):
        return RemoteError("missing", "no such object")
    if isinstance(error, PermissionError):
        return RemoteError("denied", "not allowed, or no credentials were found")
    answer = getattr(error, "response", None)
    status = getattr(error, "code", None) or getattr(answer, "status_code", None)
    if str(status or "").isdigit():
        return fault_of_status(int(str(status)), f"status {status}")
    name = type(error).__name__
    kind: Kind = "transient" if isinstance(error, (OSError, TimeoutError)) else "refused"
    if "Credential" in name or "Auth" in name:
        kind = "denied"
    return RemoteError(kind, f"the store's client failed ({name})")
