"""Which keys a bucket has: a folder's, a pattern's, or those among a list of names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.input.ordering import natural_key
from pipeline.remote import s3
from pipeline.remote.addresses import Address
from pipeline.remote.faults import RemoteError
from pipeline.remote.listing import IsWanted, Listed
from pipeline.remote.names import pattern_of, prefix_of
from pipeline.remote.objects import Version
from pipeline.remote.patience import Patience
from pipeline.remote.reader import Attempts

PAGE = 1000
MAX_EXTRA_PAGES = 20  # read beyond what the names themselves fill


class S3Listing:
    """Listings of one bucket."""

    def __init__(self, url: str) -> None:
        """Take the bucket from a url."""
        self._bucket = s3.split_url(url)[0]
        self._patience = Patience.from_environment()

    def folder(self, url: str, is_wanted: IsWanted) -> list[Listed]:
        """See `Listing.folder`."""
        prefix = s3.split_url(url)[1]
        found = [
            (key, version)
            for key, version in self._keys(prefix, delimiter="/")
            if is_wanted(os.path.basename(key))
        ]
        return self._listed(found)

    def matching(self, url: str) -> list[Listed]:
        """See `Listing.matching`."""
        pattern = s3.split_url(url)[1]
        matcher = pattern_of(pattern)
        prefix = prefix_of(pattern)
        is_flat = "/" not in pattern[len(prefix) :]
        keys = self._keys(prefix, delimiter="/" if is_flat else "")
        return self._listed([(key, version) for key, version in keys if matcher.fullmatch(key)])

    def among(self, urls: Sequence[str]) -> dict[str, Version] | None:
        """See `Listing.among`."""
        wanted = {s3.split_url(url)[1]: url for url in urls}
        if any(s3.split_url(url)[0] != self._bucket for url in urls):
            return None
        last = max(wanted, key=lambda key: key.encode())
        found: dict[str, Version] = {}
        budget = (len(wanted) // PAGE + MAX_EXTRA_PAGES) * PAGE
        prefix = os.path.commonprefix([*wanted])  # noqa: RUF071  a store's prefix is of characters
        try:
            for num_seen, (key, version) in enumerate(self._keys(prefix)):
                if key.encode() > last.encode():
                    break
                if key in wanted:
                    found[wanted[key]] = version
                if num_seen >= budget:
                    return None
        except RemoteError as error:
            if error.kind == "denied":  # who may read need not be allowed to list
                return None
            raise
        return found

    def _listed(self, found: list[tuple[str, Version]]) -> list[Listed]:
        found.sort(key=lambda pair: natural_key(pair[0]))
        return [Listed(Address.of(f"s3://{self._bucket}/{key}"), version) for key, version in found]

    def _keys(self, prefix: str, delimiter: str = "") -> Iterator[tuple[str, Version]]:
        """Yield the keys with a prefix in the store's order; its marks of folders are none."""
        token: dict[str, str] = {}
        while True:
            page = self._page({"Prefix": prefix, "Delimiter": delimiter, **token})
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):
                    version = Version(int(entry["Size"]), str(entry.get("ETag", "")))
                    yield str(entry["Key"]), version
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, options: dict[str, str]) -> Any:
        attempts = Attempts(f"s3://{self._bucket}", self._patience)
        while True:
            store = s3.connect()
            try:
                return store.client.list_objects_v2(Bucket=self._bucket, **options)
            except Exception as error:  # fault_of raises again what is not the store's
                fault = store.fault_of(error)
                if fault.kind != "transient":
                    raise fault from None
                attempts.failed(fault, "")
