"""What an fsspec store holds, by its own listing and its own matching of stars."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.input.ordering import natural_key
from pipeline.remote.addresses import Address, scheme_of
from pipeline.remote.faults import RemoteError
from pipeline.remote.filesystem_object import FilesystemObject, version_of
from pipeline.remote.listing import IsWanted, Listed
from pipeline.remote.objects import Version
from pipeline.remote.patience import Patience
from pipeline.remote.reader import Attempts


class FilesystemListing:
    """Listings by one fsspec file system."""

    def __init__(self, url: str) -> None:
        """Take the file system from a url."""
        self._scheme = scheme_of(url)
        self._patience = Patience.from_environment()

    def folder(self, url: str, is_wanted: IsWanted) -> list[Listed]:
        """See `Listing.folder`."""
        remote = FilesystemObject.at(url, self._patience)
        entries = self._until_answered(
            remote, lambda: remote.filesystem.ls(remote.path, detail=True)
        )
        return self._listed([one for one in entries if is_wanted(posixpath.basename(one["name"]))])

    def matching(self, url: str) -> list[Listed]:
        """See `Listing.matching`."""
        remote = FilesystemObject.at(url, self._patience)
        found = self._until_answered(
            remote, lambda: remote.filesystem.glob(remote.path, detail=True)
        )
        return self._listed(list(found.values()))

    def among(self, urls: Sequence[str]) -> dict[str, Version] | None:
        """See `Listing.among`: these stores answer quickly enough one by one."""
        return None

    def _until_answered(self, remote: FilesystemObject, question: Callable[[], Any]) -> Any:
        attempts = Attempts(remote.url, self._patience)
        while True:
            try:
                return remote.ask(question)
            except RemoteError as error:
                if error.kind != "transient":
                    raise
                attempts.failed(error, "")

    def _listed(self, entries: Sequence[dict[str, Any]]) -> list[Listed]:
        files = [one for one in entries if one.get("type") == "file"]
        files.sort(key=lambda one: natural_key(one["name"]))
        return [
            Listed(Address.of(f"{self._scheme}://{one['name'].lstrip('/')}"), version_of(one))
            for one in files
        ]
