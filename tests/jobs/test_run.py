"""A whole run with scripted answers: rows out are images in, however it was cut up."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.config import LimitSettings, RunConfig, WorkerSettings
from jobs.display import Silent, Standing
from jobs.ranks import Place
from jobs.result import RunResult, summary
from jobs.run import Run
from jobs.stopping import GraceOver, Stop
from pipeline.backends.scripted import ScriptedCaptioner
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.errors import RequestError, SampleError
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.output.store import CommitSettings
from pipeline.records import Request, SampleRef
from tests.commands import environment, start

COUNTS = (7, 0, 25, 12)
NUM_IMAGES = sum(COUNTS)


def make_members(name: str, count: int) -> list[tuple[str, bytes]]:
    members = []
    for index in range(count):
        members.append((f"{name}{index:03d}.jpg", make_image_bytes(seed=index)))
        members.append((f"{name}{index:03d}.json", json.dumps({"n": index}).encode()))
    return members


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for place, count in enumerate(COUNTS):
        name = "abcd"[place]
        (tmp_path / f"{name}.tar").write_bytes(make_tar_bytes(make_members(name, count)))
    return RunConfig(
        shards=(str(tmp_path),),
        out=tmp_path / "out",
        model="scripted:shuffle=5",
        keep=("json.n",),
        commit=CommitSettings(rows=5),
        worker=WorkerSettings(loader_workers=2),
        speed=SpeedSettings(slots=8, prefill_batch=4),
    )


def run(config: RunConfig) -> RunResult:
    return Run(config).run()


def rows_of(out: Path, columns: Sequence[str] = ("key", "caption", "json.n")) -> list[object]:
    paths = sorted(out.glob("*.parquet"))
    return [
        tuple(row.values())
        for path in paths
        for row in pq.ParquetFile(path).read(list(columns)).to_pylist()
    ]


def test_rows_out_are_images_in_in_shard_order(config: RunConfig) -> None:
    result = run(config)
    assert result.exit_code == 0
    rows = rows_of(config.out)
    wanted = [(f"{'abcd'[n]}{i:03d}", str(i)) for n, c in enumerate(COUNTS) for i in range(c)]
    assert [(key, kept) for key, _, kept in rows] == wanted  # type: ignore[misc]
    assert result.snapshot.images == NUM_IMAGES
    assert len(list(config.out.glob("*.parquet"))) == len(COUNTS), "an empty shard has a file too"


def test_slots_stay_full_across_shard_borders(config: RunConfig) -> None:
    snapshot = run(replace(config, model="scripted:latency=0.01")).snapshot
    busy = snapshot.busy_slot_steps / snapshot.decode_steps
    assert busy > 5.5, "of 8 slots, on average, the last few steps included"


def test_speed_settings_change_no_row(config: RunConfig) -> None:
    run(config)
    wanted = rows_of(config.out)
    other = replace(
        config,
        out=config.out.with_name("other"),
        model="scripted:shuffle=9",
        speed=SpeedSettings(slots=1, prefill_batch=1),
        commit=CommitSettings(rows=1),
    )
    run(other)
    assert rows_of(other.out) == wanted


def test_bad_samples_become_error_rows(config: RunConfig, tmp_path: Path) -> None:
    members = make_members("a", 4)
    members[2] = ("a001.jpg", b"no picture")
    members[4] = ("a002.jpg", b"")
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    result = run(replace(config, model="scripted:fail=a003", prompt="Say {json.n}."))
    assert result.exit_code == 0
    assert result.errors == {"unreadable": 1, "empty": 1, "scripted": 1}
    rows = rows_of(config.out, ["status", "error", "caption", "json.n"])[:4]
    assert [row[1] for row in rows] == [None, "unreadable", "empty", "scripted"]  # type: ignore[index]
    assert rows[1] == ("error", "unreadable", None, "1"), "kept fields stand in error rows too"


def test_several_captions_an_image(config: RunConfig, tmp_path: Path) -> None:
    members = make_members("a", 2)
    members[2] = ("a001.jpg", b"no picture")
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    sampling = SamplingSettings(num_captions=3, temperature=1.0)
    result = run(replace(config, sampling=sampling))
    assert result.snapshot.rows == 3 * (NUM_IMAGES - COUNTS[0] + 2)
    rows = rows_of(config.out, ["index", "caption_index", "error"])[:6]
    assert rows[:3] == [(0, 0, None), (0, 1, None), (0, 2, None)]
    assert rows[3:] == [(1, 0, "unreadable"), (1, 1, "unreadable"), (1, 2, "unreadable")]


def test_a_damaged_shard_is_named_and_the_job_goes_on(config: RunConfig, tmp_path: Path) -> None:
    whole = (tmp_path / "c.tar").read_bytes()
    (tmp_path / "c.tar").write_bytes(whole[: len(whole) // 2])
    result = run(config)
    assert result.exit_code == 1
    (failed,) = result.failed
    assert failed.startswith("c-")
    assert "damaged at byte" in result.failed[failed]
    assert result.after.num_done == 3
    kept = result.after.num_rows
    again = run(config)
    assert again.exit_code == 1
    assert again.snapshot.images == 0, "its good rows were kept"
    (tmp_path / "c.tar").write_bytes(whole)
    mended = run(config)
    assert mended.exit_code == 0
    assert mended.after.num_rows == NUM_IMAGES > kept


def test_a_second_run_does_nothing(config: RunConfig) -> None:
    run(config)
    times = {path: path.stat().st_mtime_ns for path in config.out.rglob("*")}
    result = run(config)
    assert (result.exit_code, result.snapshot.images) == (0, 0)
    assert result.before.num_done == len(COUNTS)
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*")} == times


def test_limit_takes_the_first_samples_and_a_later_run_goes_on(config: RunConfig) -> None:
    limited = replace(config, limits=LimitSettings(samples=10))
    for _ in range(2):
        result = run(limited)
        assert result.exit_code == 0
        assert result.limit == 10
        assert result.after.num_rows == 10, "a second run with the same limit adds nothing"
        assert result.after.num_done == 2
    assert run(config).after.num_done == len(COUNTS)
    assert len(rows_of(config.out)) == NUM_IMAGES


def test_a_limit_at_a_shards_very_end_still_makes_it_whole(config: RunConfig) -> None:
    result = run(replace(config, limits=LimitSettings(samples=COUNTS[0])))
    assert result.after.num_done == 1
    whole = run(replace(config, limits=LimitSettings(samples=1000)))
    assert whole.after.num_done == len(COUNTS)
    assert whole.limit is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_image_has_one_row_at_any_world_size(config: RunConfig, world_size: int) -> None:
    for rank in range(world_size):
        worker = WorkerSettings(Place(rank, world_size), loader_workers=1)
        assert run(replace(config, worker=worker)).exit_code == 0
    assert len(rows_of(config.out)) == NUM_IMAGES


def test_twins_at_the_same_time_leave_each_row_once(config: RunConfig) -> None:
    slow = replace(config, model="scripted:shuffle=2,latency=0.005")
    results: list[RunResult] = []
    threads = [threading.Thread(target=lambda: results.append(run(slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert len(rows_of(config.out)) == NUM_IMAGES
    assert not (config.out / "_progress").exists()


def test_too_many_errors_stop_the_job(config: RunConfig, tmp_path: Path) -> None:
    members = [(f"z{i:03d}.jpg", b"no picture") for i in range(300)]
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    result = run(replace(config, limits=LimitSettings(max_error_rate=0.5)))
    assert result.exit_code == 1
    assert result.snapshot.images < 300
    assert "--max-error-rate" in "\n".join(summary(result))


def test_wrong_requests_write_nothing(config: RunConfig) -> None:
    for wrong in (
        {"model": "no/such/folder/here"},
        {"prompt": "lone { brace"},
        {"shards": ("nowhere.tar",)},
        {"backend": "magic"},
        {"dtype": "int3"},
    ):
        with pytest.raises(RequestError):
            run(replace(config, **wrong))  # type: ignore[arg-type]
    assert not config.out.exists()


def test_the_throughput_log_ends_with_the_summarys_numbers(config: RunConfig) -> None:
    result = run(config)
    (path,) = (config.out / "_throughput").iterdir()
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["event"] == "end"
    assert last["images"] == result.snapshot.images == NUM_IMAGES
    assert last["bytes_read"] == sum(
        Path(state.shard.url).stat().st_size for state in result.after.shards
    )


def test_counters_only_grow(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.run.TICK_SECONDS", 0.01)
    monkeypatch.setattr("jobs.metering.LOG_SECONDS", 0.01)
    run(replace(config, model="scripted:latency=0.02"))
    (path,) = (config.out / "_throughput").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) > 2
    for before, after in itertools.pairwise(lines):
        for name, value in before.items():
            if isinstance(value, (int, float)):
                assert after[name] >= value, name


# Retries


class Unlucky:
    """A captioner that fails on some keys, until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = {"a003", "c000", "c024", "d001"}
        self.num_prepared = 0
        prepare = ScriptedCaptioner.prepare

        def unlucky(captioner: ScriptedCaptioner, ref: SampleRef, *rest: Any) -> Request:
            self.num_prepared += 1
            if ref.key in self.keys:
                raise SampleError("memory", "none left")
            return prepare(captioner, ref, *rest)

        monkeypatch.setattr(ScriptedCaptioner, "prepare", unlucky)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.parquet")}


def test_retry_makes_error_rows_again_and_only_those(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(replace(config, out=config.out.with_name("untroubled")))
    unlucky = Unlucky(monkeypatch)
    assert run(config).errors == {"memory": 4}
    unlucky.keys = {"c024"}
    unlucky.num_prepared = 0
    retry = replace(config, retry=frozenset({"error"}))
    result = run(retry)
    assert (result.exit_code, result.before.num_redo, unlucky.num_prepared) == (0, 4, 4)
    assert result.errors == {"memory": 1}
    unlucky.keys = set()
    assert run(retry).snapshot.images == 1
    assert files_of(config.out) == files_of(config.out.with_name("untroubled"))
    times = {path: path.stat().st_mtime_ns for path in config.out.rglob("*")}
    assert run(retry).snapshot.images == 0
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*")} == times
    assert not (config.out / "_retry").exists()


def test_a_retry_that_is_stopped_leaves_the_file_as_it_was_and_goes_on_later(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(replace(config, out=config.out.with_name("untroubled")))
    Unlucky(monkeypatch).keys |= {f"c{place:03d}" for place in range(25)}
    run(config)
    before = files_of(config.out)
    monkeypatch.undo()
    retry = replace(
        config,
        retry=frozenset({"error"}),
        model="scripted:latency=0.05",
        speed=SpeedSettings(slots=1, prefill_batch=1),
        commit=CommitSettings(rows=1),
    )
    stop = Stop()
    threading.Timer(0.7, lambda: stop.request("a test")).start()
    stopped = Run(retry, stop).run()
    assert stopped.exit_code == 75
    name = next(name for name in before if name.startswith("c-"))
    assert files_of(config.out)[name] == before[name], "readable and whole all the time"
    again = run(retry)
    assert again.exit_code == 0
    assert stopped.snapshot.images + again.snapshot.images == 27
    assert files_of(config.out) == files_of(config.out.with_name("untroubled"))


def test_retry_takes_rows_by_their_status(config: RunConfig) -> None:
    run(config)
    before = files_of(config.out)
    statuses = [row[0] for row in rows_of(config.out, ["status"])]  # type: ignore[index]
    result = run(replace(config, retry=frozenset({"truncated"})))
    assert result.snapshot.images == statuses.count("truncated") > 0
    assert files_of(config.out) == before, "scripted answers are the same again"


# Stopping


class StopsAfterFive(Silent):
    """A display that asks for a stop once some images are captioned."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def show(self, standing: Standing) -> None:
        """Look at each tick."""
        if standing.num_images >= 5:
            self.stop.request("a test")


def test_a_stop_admits_nothing_new_and_commits_what_is_finished(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.run.TICK_SECONDS", 0.005)
    stop = Stop()
    slow = replace(
        config,
        model="scripted:latency=0.1",
        speed=SpeedSettings(slots=2, prefill_batch=2),
    )
    result = Run(slow, stop, StopsAfterFive(stop)).run()
    assert result.exit_code == 75
    assert 0 < result.after.num_rows < NUM_IMAGES
    assert result.after.num_rows == result.snapshot.images, "what was finished is committed"
    assert "start me again" in "\n".join(summary(result))
    assert run(config).after.num_rows == NUM_IMAGES


def test_a_stop_after_the_last_row_is_no_reason_to_start_again(config: RunConfig) -> None:
    run(config)
    stop = Stop()
    stop.request("a test")
    assert Run(config, stop).run().exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_end_a_run_with_75(config: RunConfig, tmp_path: Path, number: int) -> None:
    process = start(
        ["run", "--shards", ".", "--out", "out", "--model", "scripted:latency=0.05", "--slots=4"],
        tmp_path,
    )
    wait_for(config.out / "_job.json")
    time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert time.monotonic() - began < 15, "the grace is 20"
    assert "start me again" in out
    assert "Traceback" not in err


def test_the_grace_ends_sequences_that_go_on(config: RunConfig, tmp_path: Path) -> None:
    process = start(
        [
            *("run", "--shards", ".", "--out", "out", "--grace-seconds", "5"),
            *("--slots", "40", "--model", "scripted:latency=1.5"),
        ],
        tmp_path,
    )
    wait_for(config.out / "_job.json")
    time.sleep(2)  # so that captions are in flight on a slow machine too
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert time.monotonic() - began < 5
    assert "grace is over" in err


def test_a_second_interrupt_ends_at_once(config: RunConfig, tmp_path: Path) -> None:
    process = start(
        ["run", "--shards", ".", "--out", "out", "--model", "scripted:latency=20"], tmp_path
    )
    wait_for(config.out / "_job.json")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT


def test_a_time_limit_ends_a_run_with_75(config: RunConfig, tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(
        [
            *("run", "--shards", ".", "--out", "out", "--time-limit", "2"),
            *("--grace-seconds", "1", "--model", "scripted:latency=1", "--slots", "2"),
        ],
        tmp_path,
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert "the time limit" in out
    assert time.monotonic() - began < 10, "the work would take twice as long"


def test_the_grace_may_only_be_cut_where_that_is_allowed() -> None:
    stop = Stop(0.05)
    with stop.listening(0.01):
        time.sleep(0.2)  # both alarms ring
        assert stop.is_requested
        with pytest.raises(GraceOver), stop.interruptible():
            pass
        with pytest.raises(GraceOver), stop.interruptible(), stop.protected():
            pass


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


def test_a_signal_before_anything_is_done_asks_to_be_started_again() -> None:
    code = (
        "import os, signal\n"
        "from jobs.stopping import nothing_done_yet\n"
        "with nothing_done_yet(): os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert done.returncode == 75
