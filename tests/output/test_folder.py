"""What every output folder promises, wherever its files lie."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from pipeline.errors import RequestError
from pipeline.output import local
from pipeline.output.folder import OutFolder, open_folder
from pipeline.output.local import LocalFolder
from tests.s3_server import S3Server

RACERS = 16


@pytest.fixture(params=["local", "s3"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OutFolder]:
    if request.param == "local":
        yield LocalFolder(tmp_path / "out")
        return
    with S3Server(page=2) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield open_folder("s3://bucket/some/out")


def test_names_and_walks_show_complete_files_alone(folder: OutFolder) -> None:
    assert folder.names() == []
    assert folder.walk() == {}
    folder.replace("a.parquet", b"a")
    folder.replace("_progress/s/1.parquet", b"12")
    folder.replace("_progress/s/0.parquet", b"0")
    with folder.draft("_progress/s/2.parquet") as draft, draft.writing() as file:
        file.write(b"half")
        assert folder.names() == ["_progress", "a.parquet"]
        assert folder.names("_progress") == ["s"]
        assert folder.names("_progress/s") == ["0.parquet", "1.parquet"]
        pieces = ["_progress/s/0.parquet", "_progress/s/1.parquet"]
        assert sorted(folder.walk("_progress")) == pieces
    assert set(folder.walk(is_deep=False)) >= {"a.parquet"}
    assert folder.walk()["_progress/s/1.parquet"].size == 2


def test_what_is_not_there_is_told_as_such(folder: OutFolder) -> None:
    assert folder.stat("x") is None
    for read in (folder.read, folder.read_version, folder.open):
        with pytest.raises(FileNotFoundError):
            read("x")
    folder.remove("x")
    folder.move("x", "_aside/x")


def test_of_many_who_create_a_file_one_does(folder: OutFolder) -> None:
    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(lambda n: folder.create_if_absent("claim", b"%d" % n), range(RACERS)))
    assert sum(won) == 1
    assert folder.read("claim") == b"%d" % won.index(True)


def test_of_many_who_replace_a_version_one_does(folder: OutFolder) -> None:
    folder.replace("claim", b"old")
    for turn in range(5):
        _, version = folder.read_version("claim")
        texts = [b"%d of turn %d" % (racer, turn) for racer in range(RACERS)]
        replace = partial(folder.replace_if_unchanged, "claim", version=version)
        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(replace, texts))
        assert sum(won) == 1
        assert folder.read("claim") == texts[won.index(True)]
        assert not folder.replace_if_unchanged("claim", b"late", version)
    folder.remove("claim")
    assert not folder.replace_if_unchanged("claim", b"gone", version)
    assert folder.names() == []


def test_a_guard_that_was_left_behind_is_broken_after_a_while(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.replace("claim", b"old")
    _, version = folder.read_version("claim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "draft", lambda *_: 1 / 0)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            folder.replace_if_unchanged("claim", b"new", version)
    assert not folder.replace_if_unchanged("claim", b"new", version)
    assert folder.names() == ["claim"]
    (guard,) = tmp_path.glob(".guard-*")
    long_ago = time.time() - local.GUARD_SECONDS - 1
    os.utime(guard, (long_ago, long_ago))
    assert folder.replace_if_unchanged("claim", b"new", version)
    assert os.listdir(tmp_path) == ["claim"]


def test_a_log_shows_whole_lines(folder: OutFolder) -> None:
    log = folder.log("_throughput/w.jsonl")
    log.append(b"1\n", is_last=False)
    assert folder.read("_throughput/w.jsonl") == b"1\n"
    log.append(b"2\n", is_last=True)
    log.close()
    assert folder.read_tail("_throughput/w.jsonl", 3) == b"\n2\n"
    assert folder.read_tail("_throughput/w.jsonl", 100) == b"1\n2\n"


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(RequestError, match="wanted a folder or s3://"):
        open_folder("ftp://host/out")
