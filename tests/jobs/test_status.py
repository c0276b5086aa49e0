"""Status reads a folder that is being written, on any machine, and says what stalls."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from jobs.config import LimitSettings
from jobs.status import StatusReader
from jobs.status_view import print_status, status_lines, watch
from jobs.workers import read_lines, read_workers
from pipeline.errors import RequestError
from pipeline.fixtures import make_photo_shard
from pipeline.output.folder import open_folder
from pipeline.throughput import THROUGHPUT, Snapshot
from tests.commands import captionjob, start
from tests.jobs.conftest import Job
from tests.jobs.outputs import make_output, small_pieces


def write_lines(out: Path, worker: str, *lines: tuple[str, float, Snapshot]) -> None:
    folder = out / THROUGHPUT
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{worker}.jsonl").open("a") as file:
        for event, when, snapshot in lines:
            line = {"event": event, "time": when, "worker": worker, **asdict(snapshot)}
            print(json.dumps(line), file=file)


def test_a_finished_job(hostile_job: Job) -> None:
    status = StatusReader(hostile_job.out, hostile_job.shards).read(alarms="all")
    assert (status.num_shards, status.num_done, status.num_to_do) == (2, 2, 0)
    assert status.num_rows == status.num_total == 34
    assert status.errors == {"truncated": 1, "empty": 1} or sum(status.errors.values()) == 2
    assert status.is_over
    assert status.seconds_left is None
    text = "\n".join(status_lines(status))
    assert "2 done, 0 in progress, 0 failed, 0 to do of 2" in text


def test_without_shards_what_is_to_do_is_not_made_up(hostile_job: Job) -> None:
    status = StatusReader(hostile_job.out).read()
    assert status.num_to_do is None
    assert "to do unknown (name --shards)" in "\n".join(status_lines(status))


def test_a_job_in_the_middle_and_a_damaged_shard(tmp_path: Path) -> None:
    shards = [make_photo_shard(tmp_path / f"{name}.tar", 30, seed=ord(name)) for name in "abcd"]
    damaged = Path(shards[0])
    damaged.write_bytes(damaged.read_bytes()[:-30000])
    out = make_output(
        tmp_path / "out", shards, commit=small_pieces(), limits=LimitSettings(samples=70)
    )
    status = StatusReader(out, shards).read()
    assert len(status.failed) == 1
    assert "damaged" in status.failed[0].reason
    assert (status.num_done, status.num_in_progress, status.num_to_do) == (1, 1, 1)
    assert status.num_pending_rows == status.num_rows - 30
    assert "FAILED   a-" in "\n".join(status_lines(status))
    found = json.loads(status.to_json())
    assert found["shards"]["to_do"] == 1
    assert found["shards"]["failed"][0]["shard"].startswith("a-")


def test_workers_run_end_stall_and_are_replaced(hostile_job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(hostile_job.out, out)
    shutil.rmtree(out / THROUGHPUT)
    now = time.time()
    slow, fast = Snapshot(seconds=100, images=1000), Snapshot(seconds=110, images=1200)
    write_lines(out, "00000-a", ("interval", now - 13, slow), ("interval", now - 3, fast))
    write_lines(out, "00001-a", ("interval", now - 900, slow))
    write_lines(out, "00002-a", ("interval", now - 900, slow))
    write_lines(out, "00002-b", ("interval", now - 20, slow), ("end", now - 10, fast))
    workers = {worker.name: worker for worker in read_workers(out, now)}
    states = {name: worker.state for name, worker in workers.items()}
    assert states == {
        "00000-a": "running",
        "00001-a": "stalled",
        "00002-a": "replaced",
        "00002-b": "ended",
    }
    assert workers["00000-a"].rate_now == pytest.approx(20)
    assert workers["00000-a"].rate == pytest.approx(1200 / 110)
    status = StatusReader(out, hostile_job.shards).read()
    text = "\n".join(status_lines(status))
    assert "STALLED, no line for 15:00" in text
    assert "and 1 earlier run of these" in text
    assert status.rate_now == pytest.approx(20)


def test_lines_that_are_cut_or_foreign_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    good = json.dumps({"event": "interval", "time": 1.0, **asdict(Snapshot(images=3))})
    path.write_text(f'{{"cut\n[]\nnull\n{{"event": 1}}\n{good}\n{good[:40]}')
    assert [line.snapshot.images for line in read_lines(open_folder(path.parent), path.name)] == [3]


def test_watching_ends_with_the_job_and_is_live_on_a_terminal(hostile_job: Job) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    reader = StatusReader(hostile_job.out, hostile_job.shards)
    plain, live = io.StringIO(), Terminal()
    watch(reader, plain, 0.01)
    watch(reader, live, 0.01)
    assert "\x1b" not in plain.getvalue()
    assert live.getvalue().startswith("\x1b[H\x1b[J")
    print_status(hostile_job.out, (), plain, as_json=True, is_watching=True, seconds=1)


def test_status_of_a_running_job(tmp_path: Path) -> None:
    shard = make_photo_shard(tmp_path / "s.tar", 400)
    arguments = ("--commit-rows", "20", "--slots", "4", "--model", "scripted:latency=0.05")
    process = start(("run", "--shards", shard, "--out", "out", *arguments), tmp_path)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (tmp_path / "out" / "_progress").is_dir():
                status = StatusReader(tmp_path / "out", [shard]).read(alarms="all")
                if status.num_pending_rows:
                    break
            time.sleep(0.05)
        assert status.num_in_progress == 1
        assert not status.is_over
        assert [worker.state for worker in status.workers] == ["running"]
    finally:
        process.kill()
        process.communicate()


def test_watching_counts_each_finished_shard_once(own_job: Job) -> None:
    reader = StatusReader(own_job.out, own_job.shards)
    first = [reader.read(alarms="finished") for _ in range(3)]
    assert len({str(status.alarms) for status in first}) == 1
    for path in own_job.out.glob("second-*.parquet"):
        path.unlink()
    again = reader.read()
    assert (again.num_rows, sum(again.statuses.values())) == (14, 14)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"settings": 1, "schema_version": 1}', '{"settings": {}}'):
        (tmp_path / "_job.json").write_text(text)
        with pytest.raises(RequestError, match=r"_job\.json"):
            StatusReader(tmp_path).read()
    done = captionjob("status", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
