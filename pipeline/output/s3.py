"""An output folder in an S3 store: the same names, each put whole or not at all.

A file's name is the key's end. What only one process may do is a conditional put, If-None-Match
or If-Match. Each put carries a token in its metadata: when the store says that the name is
taken, the token tells a put of our own whose answer was lost from that of another process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.errors import RequestError
from pipeline.fault_points import reach
from pipeline.output.folder import UPLOADS, Draft, LogFile, Stat
from pipeline.output.s3_calls import Calls
from pipeline.output.s3_files import RangedFile, S3Draft, S3Log
from pipeline.output.s3_uploads import TOKEN, Uploads
from pipeline.output.waiting import Waiting
from pipeline.remote.faults import RemoteError
from pipeline.remote.s3 import split_url

PART_BYTES = 8 << 20  # more than this goes up in parts; stores want 5 MiB or more in each
PART_VARIABLE = "CAPTIONJOB_PART_BYTES"
_THREADS = 16
_MAX_TRIES = 5


class S3Folder:
    """A prefix of a bucket; see `OutFolder` for what each method promises."""

    def __init__(self, url: str, waiting: Waiting) -> None:
        """Name it; RequestError for no bucket, or where boto3 is not installed."""
        bucket, key = split_url(url)
        key = key.strip("/")
        self.url = f"s3://{bucket}/{key}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{key}/" if key else ""
        self._part_bytes = _part_bytes()
        self._calls = Calls(self.url, bucket, waiting)
        self._uploads = Uploads(self._calls, self._prefix, self)

    @property
    def title(self) -> str:
        """The last part of the prefix, or the bucket."""
        return self.url.rpartition("/")[2]

    @property
    def absence(self) -> str:
        """A prefix is never absent: it is only empty."""
        return ""

    def place(self, name: str) -> str:
        """Return the address of a file in it."""
        return f"{self.url}/{name}"

    def holds(self, path: Path) -> bool:
        """No path of this machine lies in a store."""
        return False

    # Looking

    def names(self, folder: str = "") -> list[str]:
        """Return what lies directly in a folder, sorted."""
        found: list[str] = []
        for page in self._pages(folder, is_deep=False):
            found += [one["Key"] for one in page.get("Contents", [])]
            found += [one["Prefix"].rstrip("/") for one in page.get("CommonPrefixes", [])]
        start = len(self._key(f"{folder}/" if folder else ""))
        return sorted(key[start:] for key in found if key[start:])

    def walk(self, folder: str = "", *, is_deep: bool = True) -> dict[str, Stat]:
        """Return the files of a folder by their whole name, a thousand a request."""
        found: dict[str, Stat] = {}
        for page in self._pages(folder, is_deep=is_deep):
            for one in page.get("Contents", []):
                if not one["Key"].endswith("/"):  # the mark of an empty folder, of other tools
                    name = one["Key"][len(self._prefix) :]
                    found[name] = Stat(one["Size"], one["ETag"], _seconds(one["LastModified"]))
        return found

    def stat(self, name: str) -> Stat | None:
        """Look at one file."""
        found = self._head(name)
        if found is None:
            return None
        return Stat(found["ContentLength"], found["ETag"], _seconds(found["LastModified"]))

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        return self._get(name)[0]

    def read_version(self, name: str) -> tuple[bytes, str]:
        """Return a whole file and its ETag, both of one answer."""
        data, _, version = self._get(name)
        return data, version

    def read_tail(self, name: str, num_bytes: int) -> bytes:
        """Return the end of a file."""
        return self._get(name, -num_bytes)[0]

    def open(self, name: str) -> BinaryIO:
        """Open a file that is read by ranges."""

        def fetch(first: int, last: int | None, version: str) -> tuple[bytes, int, str]:
            return self._get(name, first, last, version)

        return cast(BinaryIO, RangedFile(fetch))

    def garbage(self, folder: str) -> list[str]:
        """Drafts are no objects."""
        return []

    # Writing

    @contextlib.contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """Give a nameless file of this machine."""
        draft = S3Draft()
        try:
            yield draft
        finally:
            draft.close()

    def put_new(self, draft: Draft, name: str) -> bool:
        """Put a draft if nobody has the name."""
        return self._put_draft(draft, name, {"IfNoneMatch": "*"})

    def put_over(self, draft: Draft, name: str, version: str | None = None) -> bool:
        """Put a draft in place of any object, or of that very version."""
        return self._put_draft(draft, name, {} if version is None else {"IfMatch": version})

    def create_if_absent(self, name: str, data: bytes, point: str = "") -> bool:
        """Put a small object if there is none of that name."""
        if point:
            reach(point)
        return self._put(name, data, {"IfNoneMatch": "*"})

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Put a small object."""
        if point:
            reach(point)
        self._put(name, data, {})

    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> bool:
        """Put a small object in place of that very version."""
        return self._put(name, data, {"IfMatch": version})

    def log(self, name: str) -> LogFile:
        """Begin an object that is put anew with each line."""
        return S3Log(
            lambda data, is_last: self._calls.make(
                "put", lambda: self._put_once(name, data, {}), is_once=not is_last
            )
        )

    def remove(self, name: str) -> None:
        """Delete an object; one that is not there is as good."""
        key = self._key(name)
        with contextlib.suppress(FileNotFoundError):
            self._calls.make(
                "remove", lambda: self._client.delete_object(Bucket=self._bucket, Key=key)
            )

    def move(self, name: str, to: str) -> None:
        """Copy an object inside the store, then delete it."""
        source = {"Bucket": self._bucket, "Key": self._key(name)}
        with contextlib.suppress(FileNotFoundError):  # a twin was first
            self._calls.make(
                "put",
                lambda: self._client.copy_object(
                    Bucket=self._bucket, Key=self._key(to), CopySource=source
                ),
                name=name,
            )
            self.remove(name)

    # The whole folder

    def check(self) -> None:
        """List a key, and begin and abort an upload, which takes the right to write."""
        self._calls.make("list", lambda: self._list("", {"MaxKeys": 1}), is_check=True)
        self._uploads.probe()

    def prepare(self) -> None:
        """Abort uploads of writers that died."""
        self._uploads.sweep()

    def clear(self, folder: str, after_each: Callable[[], None]) -> None:
        """Delete a folder's objects."""
        for name in sorted(self.walk(folder)):
            self.remove(name)
            after_each()

    def prune(self, folder: str) -> None:
        """There are no empty folders here."""

    def move_all(self, to: str, *, but: str, last: str) -> None:
        """Move every object, some at once."""
        names = [name for name in self.walk() if not name.startswith((but, UPLOADS))]
        with ThreadPoolExecutor(_THREADS) as pool:
            moved = pool.map(lambda name: self.move(name, f"{to}/{name}"), set(names) - {last})
            assert all(one is None for one in moved)  # and raise what went wrong
        self.move(last, f"{to}/{last}")

    # Requests

    @property
    def _client(self) -> Any:
        return self._calls.client

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _pages(self, folder: str, *, is_deep: bool) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {} if is_deep else {"Delimiter": "/"}
        while True:
            page = self._calls.make("list", lambda: self._list(folder, dict(more)))
            yield page
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def _list(self, folder: str, more: dict[str, Any]) -> dict[str, Any]:
        prefix = self._key(f"{folder}/" if folder else "")
        found = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **more)
        return cast(dict[str, Any], found)

    def _head(self, name: str) -> dict[str, Any] | None:
        key = self._key(name)
        try:
            found = self._calls.make(
                "read", lambda: self._client.head_object(Bucket=self._bucket, Key=key)
            )
        except FileNotFoundError:
            return None
        return cast(dict[str, Any], found)

    def _get(
        self, name: str, first: int = 0, last: int | None = None, version: str = ""
    ) -> tuple[bytes, int, str]:
        """Return bytes (with a negative `first`, the last ones), the whole size and the ETag."""
        wanted: dict[str, str] = {"IfMatch": version} if version else {}
        if first or last is not None:
            end = "" if last is None else last
            wanted["Range"] = f"bytes={first}" if first < 0 else f"bytes={first}-{end}"

        def get() -> tuple[bytes, int, str]:
            found = self._client.get_object(Bucket=self._bucket, Key=self._key(name), **wanted)
            data = found["Body"].read()
            whole = found.get("ContentRange", "").rpartition("/")[2]
            return data, int(whole or len(data)), str(found["ETag"])

        try:
            return self._calls.make("read", get, name=self.place(name))
        except RemoteError as error:
            if error.kind == "refused":  # a range of an empty object
                return b"", 0, ""
            raise FileNotFoundError(f"{self.place(name)} was replaced while it was read") from None

    def _put_draft(self, draft: Draft, name: str, condition: dict[str, str]) -> bool:
        assert isinstance(draft, S3Draft)
        if draft.size <= self._part_bytes:
            return self._put(name, draft.part(0, draft.size), condition)
        return self._decided(
            name,
            lambda token: self._uploads.put(draft, name, condition, token, self._part_bytes),
        )

    def _put(self, name: str, data: bytes, condition: dict[str, str]) -> bool:
        def put(token: str) -> None:
            self._calls.make("put", lambda: self._put_once(name, data, condition, token))

        return self._decided(name, put)

    def _put_once(self, name: str, data: bytes, condition: dict[str, str], token: str = "") -> None:
        self._client.put_object(
            Bucket=self._bucket,
            Key=self._key(name),
            Body=data,
            Metadata={TOKEN: token} if token else {},
            **condition,
        )

    def _decided(self, name: str, put: Callable[[str], None]) -> bool:
        """Put under a condition; False if another process was first."""
        token = secrets.token_hex(8)
        for _ in range(_MAX_TRIES):
            try:
                put(token)
            except FileNotFoundError:  # If-Match, and nothing is there
                return False
            except RemoteError:
                found = self._head(name)
                if found is None:
                    continue  # whoever was first has gone again
                return bool(found.get("Metadata", {}).get(TOKEN) == token)
            return True
        return False


def _part_bytes() -> int:
    text = os.environ.get(PART_VARIABLE) or str(PART_BYTES)
    if not text.isdigit() or not int(text):
        raise RequestError(f"{PART_VARIABLE}={text!r}: wanted a number of bytes")
    return int(text)


def _seconds(when: datetime) -> float:
    return when.timestamp()
