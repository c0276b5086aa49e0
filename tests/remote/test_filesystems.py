"""gs:// and hf:// go through fsspec: the same reader, told by a file system of this test's own."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.errors import RequestError, ShardError
from pipeline.input.shards import expand_shards
from pipeline.remote import filesystem_object
from pipeline.remote.filesystem_object import fault_of, version_of
from pipeline.remote.reader import open_remote

fsspec = pytest.importorskip("fsspec")

DATA = random.Random(5).randbytes(300_000)


class Flaky:
    """A memory file system whose ranges fail as told; what it has not is the true one's."""

    def __init__(self, errors: list[Exception | str]) -> None:
        self.errors = errors
        self.asked: list[tuple[int, int]] = []
        self.memory = fsspec.filesystem("memory")

    def _strip_protocol(self, url: str) -> str:
        return "/" + url.partition("://")[2]

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        error = self.errors.pop(0) if self.errors else ""
        if isinstance(error, Exception):
            raise error
        if error == "stall":
            time.sleep(2)
        data = bytes(self.memory.cat_file(path, start=start, end=end))
        if error == "replace":
            self.memory.pipe_file(path, DATA[::-1] + b"!")
        return data[:-1] if error == "short" else data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    found = Flaky([])
    monkeypatch.setattr(filesystem_object, "filesystem_for", lambda url: found)
    monkeypatch.setattr(filesystem_object, "RANGE_BYTES", 100_000)
    for name in ("a/2.tar", "a/10.tar", "a/b/3.tar", "a/notes.txt"):
        found.memory.pipe_file(f"/bucket/{name}", DATA)
    yield found
    found.memory.rm("/bucket", recursive=True)


def read(url: str) -> bytes:
    with io.BufferedReader(open_remote(url), 1 << 16) as file:
        return file.read()


def test_patterns_and_folders_stand_for_objects(flaky: Flaky) -> None:
    def urls(pattern: str) -> list[str]:
        return [shard.url for shard in expand_shards([pattern])]

    assert urls("gs://bucket/a/*.tar") == ["gs://bucket/a/2.tar", "gs://bucket/a/10.tar"]
    assert urls("gs://bucket/a/") == ["gs://bucket/a/2.tar", "gs://bucket/a/10.tar"]
    assert urls("hf://bucket/**/3.tar") == ["hf://bucket/a/b/3.tar"]
    (shard,) = expand_shards(["gs://bucket/a/{2..2}.tar"])
    assert shard.size == len(DATA)
    with pytest.raises(RequestError, match="matches no object"):
        urls("gs://bucket/x*.tar")
    with pytest.raises(RequestError, match="does not exist"):
        urls("gs://bucket/none.tar")


def test_a_range_that_fails_is_asked_again_and_no_other(flaky: Flaky) -> None:
    flaky.errors = ["", OSError("cut"), TimeoutError(), "short", ""]
    assert read("gs://bucket/a/2.tar") == DATA
    begins = [begin for begin, _ in flaky.asked]
    assert begins == [0, 100_000, 100_000, 100_000, 100_000, 200_000]


def test_a_client_that_hangs_is_left_behind(flaky: Flaky) -> None:
    flaky.errors = ["stall"]
    began = time.monotonic()
    assert read("gs://bucket/a/2.tar") == DATA
    assert time.monotonic() - began < 1.5


def test_a_store_that_never_answers_is_given_up(flaky: Flaky) -> None:
    flaky.errors = ["", *[ConnectionError()] * 4]
    with pytest.raises(ShardError, match=r"at byte 100000 of 300000, attempt 4 of 4"):
        read("hf://bucket/a/2.tar")


def test_an_object_that_changes_before_its_end_is_an_error(flaky: Flaky) -> None:
    flaky.errors = ["", "replace"]
    with pytest.raises(ShardError, match="the object changed while it was read"):
        read("gs://bucket/a/2.tar")


class _Answer:
    status_code = 401


class _StatusError(Exception):
    def __init__(self, code: Any = None, response: Any = None) -> None:
        super().__init__("https://host/?token=s3cr3t")
        self.code = code
        self.response = response


class GoogleAuthError(Exception):
    """Named as one of google-auth's."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), "missing"),
        (PermissionError("x"), "denied"),
        (_StatusError(code=503), "transient"),
        (_StatusError(code="429"), "transient"),
        (_StatusError(code=404), "missing"),
        (_StatusError(response=_Answer()), "denied"),
        (_StatusError(), "refused"),
        (GoogleAuthError(), "denied"),
        (ConnectionResetError(), "transient"),
    ],
)
def test_a_foreign_error_is_put_in_our_own_words(error: Exception, kind: str) -> None:
    fault = fault_of(error)
    assert fault.kind == kind
    assert "s3cr3t" not in fault.what


def test_any_name_for_a_version_will_do() -> None:
    assert version_of({"size": 3, "etag": "e"}).etag == "e"
    assert version_of({"size": "3", "generation": 17, "etag": ""}).etag == "17"
    assert version_of({"size": 3, "blob_id": "b"}).stamp != version_of({"size": 3}).stamp
    assert version_of({"size": 3, "created": 5.0}).etag == "5.0"
