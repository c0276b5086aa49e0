"""An object in S3, or in a store that speaks it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.errors import RequestError
from pipeline.remote import s3
from pipeline.remote.faults import RemoteError
from pipeline.remote.objects import Version

CHUNK = 1 << 16  # read at once: more would wait longer for a slow store than a stall may take


@dataclass(frozen=True, slots=True)
class S3Object:
    """One key of one bucket."""

    url: str
    bucket: str
    key: str

    @classmethod
    def at(cls, url: str) -> S3Object:
        """Return the object; RequestError where boto3 is missing or the url names no key."""
        bucket, key = s3.split_url(url)
        s3.connect()
        if not key:
            raise RequestError(f"{url!r} names a bucket and no key in it")
        return cls(url, bucket, key)

    def look(self) -> Version:
        """Ask for the first byte: unlike HEAD's, the answer says why there is none."""
        try:
            body, version = self._get({"Range": "bytes=0-0"})
        except RemoteError as error:
            if not error.what.startswith("416"):
                raise
        else:
            body.close()
            return version
        store = s3.connect()  # an empty object has no first byte
        try:
            return version_of(store.client.head_object(Bucket=self.bucket, Key=self.key))
        except Exception as error:  # fault_of raises again what is not the store's
            raise store.fault_of(error) from None

    def open(self, offset: int, end: int | None, version: Version) -> S3Body:
        """Begin to fetch; see `RemoteObject.open`."""
        options = {"IfMatch": version.etag} if version.etag else {}
        if offset or end is not None:
            options["Range"] = f"bytes={offset}-{'' if end is None else end - 1}"
        body, found = self._get(options)
        if version.is_other(found):
            body.close()
            raise RemoteError("changed", "another version came")
        return body

    def _get(self, options: dict[str, str]) -> tuple[S3Body, Version]:
        store = s3.connect()
        try:
            answer = store.client.get_object(Bucket=self.bucket, Key=self.key, **options)
        except Exception as error:  # fault_of raises again what is not the store's
            raise store.fault_of(error) from None
        # The first bytes prove that the headers before them came whole, half an etag being one too.
        first = S3Body(store, answer["Body"]).read(CHUNK)
        if not first and answer.get("ContentLength") != 0:
            raise RemoteError("transient", "the answer broke off")
        return S3Body(store, answer["Body"], first), version_of(answer)


class S3Body:
    """A stream that boto3 gave, its errors made ours."""

    def __init__(self, store: s3.S3, stream: Any, first: bytes = b"") -> None:
        """Give what was read already, and read on from `stream`."""
        self._store = store
        self._stream = stream
        self._first = first

    def read(self, max_bytes: int) -> bytes:
        """Return the next bytes."""
        if self._first:
            data, self._first = self._first[:max_bytes], self._first[max_bytes:]
            return data
        try:
            return bytes(self._stream.read(min(max_bytes, CHUNK)))
        except Exception as error:  # fault_of raises again what is not the store's
            raise self._store.fault_of(error) from None

    def close(self) -> None:
        """Let the connection go."""
        with suppress(Exception):  # nobody wants the rest
            self._stream.close()


def version_of(answer: dict[str, Any]) -> Version:
    """Return the version that an answer to HEAD or GET tells."""
    total = re.fullmatch(r"bytes \d+-\d+/(\d+)", str(answer.get("ContentRange", "")))
    size = int(total[1]) if total else answer.get("ContentLength")
    return Version(size, str(answer.get("ETag", "")))
