"""What urls stand for: braces, stars, folders; how large; and that no secret is shown."""

from __future__ import annotations

import fnmatch
import glob
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import JobError, RequestError
from pipeline.input.identity import identify, stamp_of
from pipeline.input.shards import expand_shards, open_shard
from pipeline.records import Shard
from pipeline.remote import listing
from pipeline.remote.addresses import Address, shown
from pipeline.remote.names import pattern_of
from tests.remote.fault_server import Fault, Store

pytest.importorskip("boto3")

NAMES = ["s-1.tar", "s-2.tar", "s-10.tar", "sub/s-1.tar", "sub/t.tar.gz", "notes.txt", ".s-9.tar"]


@pytest.fixture
def bucket(account: Store) -> Store:
    for name in NAMES:
        account.objects[f"/bucket/x/{name}"] = name.encode()
    return account


def urls(*patterns: str) -> list[str]:
    return [shard.url for shard in expand_shards(patterns)]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["s-2.tar"], ["s-2.tar"]),
        (["s-{1..2}.tar"], ["s-1.tar", "s-2.tar"]),
        (["s-*.tar"], ["s-1.tar", "s-2.tar", "s-10.tar"]),
        (["s-[0-9].tar"], ["s-1.tar", "s-2.tar"]),
        (["**/*.tar"], ["s-1.tar", "s-2.tar", "s-10.tar", "sub/s-1.tar"]),
        (["{s-2,sub/*}.tar"], ["s-2.tar", "sub/s-1.tar"]),
        ([""], ["s-1.tar", "s-2.tar", "s-10.tar"]),
        (["sub/"], ["sub/s-1.tar", "sub/t.tar.gz"]),
        (["s-2.tar", "s-*.tar"], ["s-2.tar", "s-1.tar", "s-10.tar"]),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_patterns_in_s3_stand_for_what_they_would_on_a_disk(
    patterns: list[str], found: list[str]
) -> None:
    got = urls(*[f"s3://bucket/x/{pattern}" for pattern in patterns])
    assert got == [f"s3://bucket/x/{name}" for name in found]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("s3://bucket/x/none.tar", "does not exist"),
        ("s3://bucket/x/none-*.tar", "matches no object"),
        ("s3://bucket/none/", "holds no tar and no Parquet file"),
        ("s3://bucket/x/s-{1..5}.tar", r"3 of 5 objects are missing: .*s-3\.tar, .*s-5\.tar$"),
        ("s3://bucket/x/s-{1..90}.tar", r"87 of 90 objects are missing: .*\.\.\.$"),
        ("s3://bucket/x/s-{1..99999999999}.tar", "more than 1000000 files"),
        ("s3://me:s3cr3t@bucket/x.tar", "wanted s3://BUCKET/KEY"),
        ("s3://bucket", "holds no tar and no Parquet file"),
        ("ftp://me:s3cr3t@host/x.tar", "ftp:// is not supported; wanted a path, or one of s3,"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_what_is_not_there_is_named_in_one_line(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        expand_shards([pattern])
    assert "\n" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_a_folder_of_tars_is_its_tars_and_one_of_parquet_files_is_these(bucket: Store) -> None:
    """img2dataset puts a Parquet file beside each tar."""
    for name in ("y/0.tar", "y/0.parquet", "z/0.parquet", "z/_metadata.parquet"):
        bucket.objects[f"/bucket/{name}"] = b"x"
    assert urls("s3://bucket/y/") == ["s3://bucket/y/0.tar"]
    assert urls("s3://bucket/z/") == ["s3://bucket/z/0.parquet"]


def test_many_keys_are_told_by_a_listing_and_few_are_asked_for(bucket: Store) -> None:
    for number in range(100):
        bucket.objects[f"/bucket/y/{number:05d}.tar"] = b"x" * number
    assert [shard.size for shard in expand_shards(["s3://bucket/y/{00000..00099}.tar"])] == [
        *range(100)
    ]
    assert all("list-type" in asked for asked in bucket.asked)
    bucket.asked.clear()
    expand_shards(["s3://bucket/y/{00001..00009}.tar"])
    assert [asked.rpartition(" ")[2] for asked in bucket.asked] == ["bytes=0-0"] * 9


def test_who_may_read_but_not_list_can_name_many_keys(
    bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        bucket.objects[f"/bucket/y/{number:05d}.tar"] = b"x"
    monkeypatch.setattr(bucket, "may_list", False)
    assert len(expand_shards(["s3://bucket/y/{00000..00059}.tar"])) == 60
    with pytest.raises(RequestError, match="403 AccessDenied"):
        expand_shards(["s3://bucket/y/*.tar"])


def test_a_shard_has_the_same_stamp_whether_it_was_listed_or_asked_for(bucket: Store) -> None:
    assert bucket.url
    (listed,) = expand_shards(["s3://bucket/x/s-2.*"])
    (asked,) = expand_shards(["s3://bucket/x/s-2.tar"])
    assert listed == asked
    assert listed.stamp == stamp_of(listed)
    assert listed.size == len("s-2.tar")


def test_web_addresses_are_expanded_and_sized(store: Store) -> None:
    for number in range(3):
        store.objects[f"/a/{number}.tar"] = b"x" * (number + 1)
    shards = expand_shards([f"{store.url}/a/{{0..2}}.tar"])
    assert [shard.size for shard in shards] == [1, 2, 3]
    with pytest.raises(RequestError, match=r"1 of 4 objects are missing: .*/a/3\.tar"):
        expand_shards([f"{store.url}/a/{{0..3}}.tar"])
    for pattern in ("a/*.tar", "a/", ""):
        with pytest.raises(RequestError, match="HTTP has no listing; wanted names"):
            expand_shards([f"{store.url}/{pattern}"])


def test_beyond_a_number_of_web_addresses_nothing_is_asked_before_its_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_ASKED", 5)
    shards = expand_shards([f"{store.url}/a/{{0..9}}.tar"])
    assert [shard.size for shard in shards] == [None] * 10
    assert not store.asked


def test_a_store_that_does_not_answer_ends_the_job_after_some_attempts(store: Store) -> None:
    store.schedule = [Fault("status", status=503)] * 4
    with pytest.raises(JobError, match=r"503 .*attempt 4 of 4") as caught:
        expand_shards([f"{store.url}/a.tar"])
    assert not isinstance(caught.value, RequestError)


def test_one_refusal_among_many_objects_is_enough(store: Store) -> None:
    store.schedule = [Fault("status", status=403)] * 1000
    with pytest.raises(RequestError, match="403 Forbidden AccessDenied"):
        expand_shards([f"{store.url}/{{0..999}}.tar"])
    assert len(store.asked) < 200


SIGNED = "X-Amz-Credential=AKIA5&X-Amz-Signature={}&X-Amz-Expires=60"


def test_a_signed_url_is_the_same_shard_whatever_its_signature_and_shows_none(
    store: Store,
) -> None:
    store.objects["/a.tar"] = b"tar"
    plain, today, tomorrow = (
        expand_shards([f"{store.url}/a.tar{query}"])[0]
        for query in ("", f"?{SIGNED.format('s3cr3t')}", f"?{SIGNED.format('an0ther')}")
    )
    assert plain.id == today.id == tomorrow.id
    assert today.url == f"{store.url}/a.tar"
    assert "s3cr3t" not in repr(today)
    with open_shard(today) as file:
        assert file.read() == b"tar"
    assert "s3cr3t" in store.asked[-1]
    assert "s3cr3t" not in identify(today).to_json()


def test_a_parameter_that_chooses_the_object_tells_shards_apart(store: Store) -> None:
    store.objects["/get"] = b"tar"
    shards = expand_shards([f"{store.url}/get?part={{1..3}}&token=s3cr3t"])
    assert len({shard.id for shard in shards}) == 3
    assert {shard.url for shard in shards} == {f"{store.url}/get"}


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://me:pw@Host/a.tar", "https://host/a.tar"),
        ("https://h/a.tar?b=1&Signature=x&Expires=2&Key-Pair-Id=y", "https://h/a.tar?b=1"),
        ("https://h/a.tar?sv=1&se=2&sp=r&sig=x", "https://h/a.tar"),
        ("https://h/a.tar?sp=r&X-Goog-Signature=x", "https://h/a.tar?sp=r"),
        ("https://h/a%20b.tar#x", "https://h/a%20b.tar"),
        ("s3://bucket/a?b#c.tar", "s3://bucket/a?b#c.tar"),
    ],
)
def test_a_signature_is_no_part_of_a_name(url: str, name: str) -> None:
    assert Address.of(url).name == name


@given(st.text(alphabet="abc.@:/?#&=", max_size=20), st.sampled_from(["http", "https", "HTTP"]))
def test_nothing_between_scheme_and_host_nor_behind_a_question_mark_is_shown(
    rest: str, scheme: str
) -> None:
    secret = "S3CR3T"
    for url in (f"{scheme}://u:{secret}@h/{rest}", f"{scheme}://h/a?{rest}{secret}"):
        assert secret not in shown(url)
        assert secret not in repr(Address.of(url))


@given(st.text(alphabet="ab./", min_size=1, max_size=8), st.text(alphabet="ab.*?/", max_size=8))
def test_stars_match_names_in_a_store_as_they_match_files(name: str, pattern: str) -> None:
    """The disk decides: what `glob` finds of one file is what the expression says of its name."""
    parts = name.split("/")
    wanted = pattern.split("/")
    if "" in parts or "." in parts or ".." in parts or "" in wanted or "**" in pattern:
        return
    agrees = len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) and not (part[0] == "." and want[0] in "*?")
        for part, want in zip(parts, wanted, strict=True)
    )
    assert bool(pattern_of(pattern).fullmatch(name)) == agrees


def test_two_stars_cross_folders_as_they_do_on_a_disk(tmp_path: Path) -> None:
    names = ["a.tar", "b/a.tar", "b/c/a.tar", "b/.h/a.tar", ".h/a.tar", "b/[x].tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in ("**/*.tar", "**", "b/**/*.tar", "*/**/a.tar", "**/[[]x].tar", "**/[!a].tar"):
        found = {
            os.path.relpath(one, tmp_path)
            for one in glob.glob(str(tmp_path / pattern), recursive=True)
            if os.path.isfile(one)
        }
        assert {one for one in names if pattern_of(pattern).fullmatch(one)} == found, pattern


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("http://h/a.tar", "urllib3", "http"),
        ("s3://bucket/a.tar", "boto3", "s3"),
        ("gs://bucket/a.tar", "fsspec", "gs"),
        ("hf://datasets/a/b/c.tar", "fsspec", "hub"),
    ],
)
def test_a_missing_extra_is_named(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("AWS_REGION", f"nowhere-{os.urandom(4).hex()}")  # no client is remembered
    with pytest.raises(RequestError, match=rf"pip install 'captionjob\[{extra}\]'"):
        expand_shards([url])


def test_a_remote_shard_that_nobody_listed_can_be_opened(store: Store) -> None:
    store.objects["/a.tar"] = b"tar"
    with open_shard(Shard("a", f"{store.url}/a.tar")) as file:
        assert file.read() == b"tar"
