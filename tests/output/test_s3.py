"""An output in an S3 store: lost answers, outages, large files, and who may do what."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.errors import JobError, RequestError, StoreDownError
from pipeline.output import s3_calls, s3_uploads, thinning
from pipeline.output.folder import OutFolder, open_folder
from pipeline.output.s3 import S3Folder
from pipeline.output.waiting import Waiting
from tests.s3_server import S3Server

DATA = bytes(range(256)) * 60
DEAD = 4194304  # no process has this number


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(page=2) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CAPTIONJOB_PART_BYTES", "4000")
        monkeypatch.setenv("CAPTIONJOB_STALL_SECONDS", "1")
        yield server


def folder_of(waiting: Waiting | None = None) -> S3Folder:
    found = open_folder("s3://bucket/out", waiting or Waiting(5.0))
    assert isinstance(found, S3Folder)
    return found


def put(folder: OutFolder, name: str, data: bytes, version: str | None = None) -> bool:
    with folder.draft(name) as draft:
        with draft.writing() as file:
            file.write(data)
        return folder.put_over(draft, name, version) if version else folder.put_new(draft, name)


@pytest.mark.parametrize("data", [DATA, b"small"])
def test_a_put_whose_answer_was_lost_is_ours_and_a_twins_is_not(
    server: S3Server, data: bytes
) -> None:
    num_writes = 1 if data == b"small" else 2 * len(data) // 4000 + 4
    for place in range(num_writes):
        folder, name = folder_of(), f"file-{place}"
        server.log.clear()
        server.lose_nth_reply = place
        assert put(folder, name, data)
        assert folder.read(name) == data
        assert not put(folder, name, data), "the same bytes, but somebody was first"
    # What was begun, and nobody was told its id: it holds nothing, and goes after a day.
    assert not any(upload.parts for upload in server.uploads.values())
    assert not folder.walk("_uploads")


def test_a_version_is_replaced_once_even_where_the_answer_is_lost(server: S3Server) -> None:
    folder = folder_of()
    put(folder, "a", DATA)
    stat = folder.stat("a")
    assert stat is not None
    server.lose_replies = 1
    assert put(folder, "a", DATA[1:], stat.version)
    assert not put(folder, "a", DATA[2:], stat.version)
    assert folder.read("a") == DATA[1:]
    server.lose_replies = 1
    _, version = folder.read_version("a")
    assert folder.replace_if_unchanged("a", b"claim", version)
    assert not folder.replace_if_unchanged("gone", b"claim", version)


def test_a_file_is_read_by_ranges_of_one_version(server: S3Server) -> None:
    folder = folder_of()
    data = os.urandom(200_000)
    folder.replace("a", data)
    with folder.open("a") as file:
        assert file.seek(0, io.SEEK_END) == len(data)
        for start, num_bytes in ((0, 10), (199_990, 100), (130_000, 20_000), (5, 0), (77, -1)):
            file.seek(start)
            assert file.read(num_bytes) == data[start:][: num_bytes if num_bytes >= 0 else None]
    assert sum(line == "GET bucket/out/a" for line in server.log) == 2
    with folder.open("a") as file:
        folder.replace("a", data[::-1])
        with pytest.raises(FileNotFoundError, match="was replaced while it was read"):
            file.read(10)
    folder.replace("empty", b"")
    with folder.open("empty") as file:
        assert file.read() == b""


def test_marks_of_empty_folders_are_no_files(server: S3Server) -> None:
    folder = folder_of()
    folder.replace("a.parquet", b"a")
    for key in ("out/", "out/_progress/", "out/_progress/s/"):
        server.put(f"bucket/{key}", b"")
    assert list(folder.walk()) == ["a.parquet"]
    assert folder.names() == ["_progress", "a.parquet"]


# Outages


def test_an_outage_is_waited_out_and_told(server: S3Server) -> None:
    said: list[str] = []
    folder = folder_of(Waiting(30.0, say=said.append))
    folder.replace("a", b"1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_calls, "TELL_SECONDS", 0.1)
        server.refusals = 4
        folder.replace("a", b"2")
    assert folder.read("a") == b"2"
    assert [" ".join(line.split()[1:4]) for line in said] == [
        "does not answer",
        "answers again after",
    ]


def test_a_store_that_stays_down_is_given_up_in_time_and_at_once_the_next_time(
    server: S3Server,
) -> None:
    folder = folder_of(Waiting(1.0))
    folder.replace("a", b"1")
    server.refusals = 10**6
    began = time.monotonic()
    with pytest.raises(StoreDownError, match="503 SlowDown"):
        folder.replace("a", b"2")
    assert 0.9 < time.monotonic() - began < 3
    began = time.monotonic()
    with pytest.raises(StoreDownError):
        folder.walk()
    assert time.monotonic() - began < 0.5
    server.refusals = 0
    assert folder.read("a") == b"1"


def test_a_stop_ends_the_waiting_even_in_a_request_that_hangs(server: S3Server) -> None:
    until = time.monotonic() + 0.5
    waiting = Waiting(60.0, lambda: until - time.monotonic())
    folder = folder_of(waiting)
    os.environ["CAPTIONJOB_STALL_SECONDS"] = "30"
    release = threading.Event()
    server.before_answer = release.wait
    began = time.monotonic()
    with pytest.raises(StoreDownError):
        folder.read("a")
    assert time.monotonic() - began < 2
    release.set()


def test_what_worked_before_and_is_denied_now_is_an_outage(server: S3Server) -> None:
    folder = folder_of(Waiting(0.5))
    folder.replace("a", b"1")
    server.is_read_only = True
    with pytest.raises(StoreDownError, match="403 AccessDenied"):
        folder.replace("a", b"2")


# Who may do what


def test_who_may_not_write_is_told_before_anything_is_done(server: S3Server) -> None:
    server.is_read_only = True
    with pytest.raises(RequestError, match="writing to bucket 'bucket' was denied"):
        folder_of().check()
    server.buckets.clear()
    with pytest.raises(RequestError, match="there is no bucket 'bucket'"):
        folder_of().check()


def test_checking_leaves_nothing_in_the_store(server: S3Server) -> None:
    folder_of().check()
    assert not server.objects
    assert not server.uploads


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "s3://KEY:SECRET@bucket/out"])
def test_an_address_without_a_plain_bucket_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RequestError, match="wanted s3://BUCKET") as caught:
        open_folder(url)
    assert "SECRET" not in str(caught.value)


def test_no_message_holds_a_secret(server: S3Server) -> None:
    said: list[str] = []
    folder = folder_of(Waiting(0.3, say=said.append))
    server.refusals = 10**6
    with pytest.raises(JobError) as caught:
        folder.check()
    for text in [*said, str(caught.value), repr(folder), folder.url]:
        assert "a-secret-of-tests" not in text
        assert "someone" not in text


# Uploads that nobody completed


def test_uploads_of_dead_processes_are_aborted_and_those_of_live_ones_are_not(
    server: S3Server,
) -> None:
    folder = folder_of()
    mine = s3_uploads.writer_name()
    dead = mine.replace(f"-{os.getpid()}-", f"-{DEAD}-")
    elsewhere = f"0123abcd-{os.getpid()}-00000000"
    for writer in (mine, dead, elsewhere):
        server.begin_upload(f"bucket/out/{writer}.parquet", writer)
        note = {"key": f"out/{writer}.parquet", "upload": writer}
        folder.replace(f"_uploads/{writer}", json.dumps(note).encode())
    server.begin_upload("bucket/out/old.parquet", "old", age=s3_uploads.ORPHAN_SECONDS + 60)
    server.begin_upload("bucket/out/young.parquet", "young")
    server.begin_upload("bucket/other/old.parquet", "foreign", age=10**6)
    folder.prepare()
    assert set(server.uploads) == {mine, elsewhere, "young", "foreign"}
    assert set(folder.walk("_uploads")) == {f"_uploads/{mine}", f"_uploads/{elsewhere}"}


def test_an_upload_that_is_aborted_under_its_writers_hands_is_begun_anew(server: S3Server) -> None:
    folder = folder_of()
    server.abort_after_parts = 2
    assert put(folder, "a", DATA)
    assert folder.read("a") == DATA
    assert not server.uploads


def test_a_part_that_cannot_be_put_leaves_no_upload(server: S3Server) -> None:
    folder = folder_of()
    server.refuse_parts = True
    with pytest.raises(JobError, match="was refused"):
        put(folder, "a", DATA)
    assert not server.uploads
    assert folder.stat("a") is None


# Logs


def test_a_log_survives_moments_without_a_store(server: S3Server) -> None:
    folder = folder_of()
    log = folder.log("_throughput/w.jsonl")
    log.append(b"1\n", is_last=False)
    server.refusals = 1
    log.append(b"2\n", is_last=False)
    assert folder.read("_throughput/w.jsonl") == b"1\n"
    server.refusals = 1
    log.append(b"3\n", is_last=True)
    assert folder.read("_throughput/w.jsonl") == b"1\n2\n3\n"


def test_a_long_log_is_thinned_and_keeps_its_ends() -> None:
    lines = [b"%06d\n" % number for number in range(5000)]
    data = b""
    for line in lines:
        data = thinning.thinned(data + line, 7000)
        assert len(data) <= 7000
    found = data.splitlines(keepends=True)
    assert found == sorted(set(found))
    assert found[0] == lines[0]
    assert found[-4:] == lines[-4:]
    assert len(found) > 300
