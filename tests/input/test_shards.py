"""Which shards are asked for, what they are called, who has which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RequestError, ShardError
from pipeline.input.shards import expand_shards, natural_key, open_shard, shard_id
from pipeline.records import Shard


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for name in ("s-1.tar", "s-2.tar", "s-10.tar", "sub/s-1.tar", "sub/t.tar.gz", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return tmp_path


def names(tars: Path, *patterns: str) -> list[str]:
    shards = expand_shards([str(tars / pattern) for pattern in patterns])
    return [os.path.relpath(shard.url, tars) for shard in shards]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["s-2.tar"], ["s-2.tar"]),
        (["s-{1..2}.tar"], ["s-1.tar", "s-2.tar"]),
        (["s-{10,2}.tar"], ["s-10.tar", "s-2.tar"]),
        (["s-*.tar"], ["s-1.tar", "s-2.tar", "s-10.tar"]),
        (["**/*.tar"], ["s-1.tar", "s-2.tar", "s-10.tar", "sub/s-1.tar"]),
        (["{s-2,sub/*}.tar"], ["s-2.tar", "sub/s-1.tar"]),
        (["sub"], ["sub/s-1.tar", "sub/t.tar.gz"]),
        (["{sub,}/"], ["sub/s-1.tar", "sub/t.tar.gz", "s-1.tar", "s-2.tar", "s-10.tar"]),
        (["s-2.tar", "s-*.tar", "./s-2.tar"], ["s-2.tar", "s-1.tar", "s-10.tar"]),
    ],
)
def test_patterns_stand_for_files_in_a_stable_order_each_once(
    tars: Path, patterns: list[str], found: list[str]
) -> None:
    assert names(tars, *patterns) == found


def test_a_name_that_really_holds_braces_or_stars_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a{1..2}*.tar").write_bytes(b"")
    assert names(tmp_path, "a{1..2}*.tar") == ["a{1..2}*.tar"]


def test_zero_padding_is_kept(tmp_path: Path) -> None:
    for i in range(8, 12):
        (tmp_path / f"{i:05d}.tar").write_bytes(b"")
    wanted = ["00008.tar", "00009.tar", "00010.tar", "00011.tar"]
    assert names(tmp_path, "{00008..00011}.tar") == wanted


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none.tar", "does not exist"),
        ("none-*.tar", "matches no file"),
        ("s-{1..5}.tar", r"3 of 5 files are missing: .*s-3\.tar, .*s-4\.tar, .*s-5\.tar$"),
        ("s-{1..99}.tar", r"96 of 99 files are missing: .*\.\.\.$"),
        ("s-{1..99999999999}.tar", "more than 1000000 files"),
        ("s-{1..2.tar", "a brace with no partner"),
        ("empty", "a folder with no tar, Parquet file or picture in it"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(tars: Path, pattern: str, message: str) -> None:
    (tars / "empty").mkdir()
    with pytest.raises(RequestError, match=message) as caught:
        names(tars, pattern)
    assert pattern in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "is empty"),
        ("pipe:cat x.tar", "--allow-pipe"),
        ("PIPE:cat x.tar", "--allow-pipe"),
        ("ftp://me:word@host/x.tar", "ftp://host/x.tar.*ftp:// is not supported"),
        ("gopher://x", "gopher:// is not supported"),
    ],
)
def test_nothing_is_opened_by_a_shell_or_an_unknown_scheme(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        expand_shards([pattern])
    with pytest.raises(RequestError, match="no --shards"):
        expand_shards([])


def test_a_file_url_is_a_path(tars: Path) -> None:
    (tars / "a b.tar").write_bytes(b"tar")
    url = (tars / "a b.tar").as_uri()
    (shard,) = expand_shards([url])
    assert shard.url == str(tars / "a b.tar")
    assert shard.size == 3
    with open_shard(shard) as file:
        assert file.read() == b"tar"


def test_a_shard_that_went_away_is_a_shard_error() -> None:
    with pytest.raises(ShardError, match="cannot be opened"):
        open_shard(Shard("x", "/nowhere/x.tar"))


def test_same_base_names_in_different_folders_have_different_ids(tars: Path) -> None:
    one, two = expand_shards([str(tars / "s-1.tar"), str(tars / "sub/s-1.tar")])
    assert one.id != two.id
    assert one.id.startswith("s-1-")


def test_an_id_depends_on_the_path_alone(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = expand_shards([str(tars / "s-1.tar")])[0]
    monkeypatch.chdir(tars / "sub")
    among_others = expand_shards(["s-1.tar", "../s-*.tar"])[1]
    assert among_others == alone


@given(st.text(st.characters(exclude_characters="\0"), min_size=1))
def test_an_id_is_a_safe_file_name_that_readers_do_not_skip(name: str) -> None:
    found = shard_id(f"/data/{name}")
    assert found.isascii()
    assert "/" not in found
    assert found[0] not in "._-"
    assert len(found) <= 109


def test_names_that_differ_only_in_unsafe_characters_have_different_ids() -> None:
    assert len({shard_id(f"/{name}") for name in ("a b.tar", "a_b.tar", "a/b.tar", "a b.tgz")}) == 4


@given(st.lists(st.text(), max_size=8))
def test_natural_order_is_total(texts: list[str]) -> None:
    backwards = texts[::-1]
    assert sorted(texts, key=natural_key) == sorted(backwards, key=natural_key)
    assert sorted(["a10", "a2", "a02"], key=natural_key) == ["a02", "a2", "a10"]


def test_the_input_stages_import_no_torch() -> None:
    stages = ("input.shards", "input.reader", "input.pack", "images.opening")
    modules = (*stages, "prompts", "prefetch", "fixtures")
    code = ";".join(f"import pipeline.{name}" for name in modules)
    code += ";import sys;assert not {'torch','webdataset'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
