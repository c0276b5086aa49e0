"""`captionjob bench`: what it measures is the job, and what it advises was measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jobs.bench.run
import jobs.bench.search
import pipeline.verdict
from jobs.bench.knobs import Knobs, Limits, neighbours
from jobs.bench.run import Bench, bench
from jobs.bench.search import Search, Tried
from jobs.bench.view import as_json, command, lines
from jobs.cli import cli
from jobs.config import RunConfig, WorkerSettings
from jobs.stopping import Stop
from pipeline.captioner import SpeedSettings
from pipeline.errors import JobError, RequestError
from pipeline.fixtures import make_image_bytes, make_photo_shard, make_shard
from pipeline.throughput import Snapshot
from pipeline.verdict import Tuning
from tests.commands import environment, start

KNOBS = Knobs(slots=16, prefill_batch=8, threads=2, loader_workers=2)
LIMITS = Limits(num_captions=1, cores=4, is_cpu=True)
LONG = {"seconds": 20.0, "images": 400, "busy_slot_steps": 95, "total_slot_steps": 100}
NEVER = time.monotonic() + 1e6


@pytest.mark.parametrize(
    ("counters", "first"),
    [
        ({"waiting_seconds": 9.0}, "--loader-workers 4"),
        ({"decode_seconds": 18.0}, "--slots 32"),
        ({"vision_seconds": 18.0}, "--threads 1"),
        ({"prefill_seconds": 18.0}, "--threads 1"),
    ],
)
def test_what_bounds_the_job_is_tried_first(counters: dict[str, float], first: str) -> None:
    seen = Snapshot(**{**LONG, **counters})  # type: ignore[arg-type]
    assert KNOBS.changes(next(neighbours(KNOBS, seen, LIMITS))) == first


def test_no_step_leaves_what_is_possible() -> None:
    seen = Snapshot(**LONG, decode_seconds=18.0)  # type: ignore[arg-type]
    small = Knobs(slots=4, prefill_batch=2, threads=4, loader_workers=2)
    for knobs in neighbours(small, seen, Limits(num_captions=2, cores=4, is_cpu=True)):
        assert knobs.threads <= 4
        assert knobs.prefill_batch * 2 <= knobs.slots
    on_device = Limits(num_captions=1, cores=4, is_cpu=False)
    assert {one.threads for one in neighbours(KNOBS, seen, on_device)} == {2}


def searched(rate: dict[str, float], **changes: object) -> tuple[Search, Knobs]:
    """Search with rates by what is changed; what is not named is as fast as what was asked."""

    def measure(knobs: Knobs, seconds: float) -> Snapshot:
        images = rate.get(KNOBS.changes(knobs), 20.0) * seconds
        return Snapshot(seconds=seconds, images=round(images * 1000)) if seconds else Snapshot()

    seen = Snapshot(**LONG, decode_seconds=18.0)  # type: ignore[arg-type]
    asked = Tried(KNOBS, 20_000.0)
    search = Search(measure, LIMITS, NEVER, asked, seen)
    for name, value in changes.items():
        setattr(search, name, value)
    return search, search.run()


def test_the_search_goes_on_from_what_is_faster() -> None:
    search, chosen = searched(
        {"--slots 32": 25.0, "--slots 64": 30.0, "--slots 64 --threads 1": 40.0}
    )
    assert KNOBS.changes(chosen) == "--slots 64 --threads 1"
    assert not search.untried
    assert len({one.knobs for one in search.tried}) == len(search.tried) - 1, "only the last twice"


def test_a_gain_within_the_noise_changes_nothing() -> None:
    _, chosen = searched({"--slots 32": 20.9, "--threads 1": 20.5})
    assert chosen == KNOBS


def test_what_does_not_win_again_at_the_end_is_not_taken() -> None:
    runs: list[Knobs] = []

    def measure(knobs: Knobs, seconds: float) -> Snapshot:
        runs.append(knobs)
        is_lucky = knobs.slots == 32 and runs.count(knobs) == 1
        return Snapshot(seconds=1.0, images=30 if is_lucky else 20)

    _, chosen = searched({}, measure=measure, asked=Tried(KNOBS, 20.0))
    assert chosen == KNOBS


def test_what_the_time_does_not_suffice_for_is_named() -> None:
    soon = time.monotonic() + 60
    search, chosen = searched({"--slots 32": 99.0}, asked=Tried(KNOBS, 0.5), deadline=soon)
    assert chosen == KNOBS
    assert KNOBS.changes(search.untried[0]) == "--slots 32"
    search, chosen = searched({"--slots 32": 99.0}, deadline=time.monotonic())
    assert not search.tried
    assert search.untried


def test_a_trial_is_long_enough_for_its_slots() -> None:
    search, _ = searched({}, asked=Tried(KNOBS, 2.0))
    search.share = 1.0
    assert search._seconds(replace(KNOBS, slots=8)) == pytest.approx(6.0)
    assert search._seconds(replace(KNOBS, slots=32)) == pytest.approx(24.0)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    monkeypatch.setattr(jobs.bench.run, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(jobs.bench.search, "MIN_TRIAL_SECONDS", 0.4)
    monkeypatch.setattr(pipeline.verdict, "MIN_SECONDS", 0.0)
    make_photo_shard(tmp_path / "a.tar", 200)  # few files to finish
    before = torch.get_num_threads()
    yield RunConfig(
        shards=(str(tmp_path / "a.tar"),),
        out=".",
        speed=SpeedSettings(slots=4, prefill_batch=2),
        worker=WorkerSettings(loader_workers=1),
    )
    torch.set_num_threads(before)


def measure(config: RunConfig, seconds: float) -> Bench:
    return bench(config, seconds, Stop(1.0), lambda text: None)


def test_a_slow_loader_is_found_and_more_of_it_taken(config: RunConfig) -> None:
    found = measure(replace(config, model="scripted:open=0.02"), 6.0)
    assert found.verdict.startswith("loader-bound: the network waited")
    assert found.loader_alone == pytest.approx(50, rel=0.3)
    assert found.network_alone > 4 * found.loader_alone
    assert found.chosen.loader_workers > 1
    assert f"--loader-workers {found.chosen.loader_workers}" in command(found, [])


def test_a_slow_network_is_measured_alone_too(config: RunConfig) -> None:
    found = measure(replace(config, model="scripted:vision=0.02"), 4.0)
    assert found.verdict.startswith("vision-bound")
    assert found.network_alone == pytest.approx(50, rel=0.3)
    assert found.loader_alone > 2 * found.network_alone
    assert found.whole is not None
    assert found.whole.images_per_second == pytest.approx(found.network_alone, rel=0.3)


def test_a_network_so_slow_that_nothing_ends_says_where_its_time_goes(config: RunConfig) -> None:
    slow = replace(
        config, model="scripted:prefill=0.9", speed=SpeedSettings(slots=900, prefill_batch=2)
    )
    found = replace(
        measure(slow, 2.0), whole=Snapshot(seconds=4.0, prefill_seconds=3.0), chosen=KNOBS
    )
    assert found.verdict.startswith("prefill-bound: 75%")
    assert "give it more --seconds" in found.verdict


def test_shards_without_an_image_are_told(config: RunConfig, tmp_path: Path) -> None:
    make_shard(tmp_path / "a.tar", [("a.jpg", b"no picture")])
    with pytest.raises(JobError, match="no image of --shards"):
        measure(replace(config, model="scripted"), 1.0)
    with pytest.raises(RequestError, match="--seconds is -1"):
        measure(config, -1.0)


def test_identical_images_are_copied_in_the_measured_job_too(
    config: RunConfig, tmp_path: Path
) -> None:
    make_shard(tmp_path / "a.tar", [(f"{n}.jpg", make_image_bytes(seed=1)) for n in range(200)])
    found = measure(replace(config, model="scripted:vision=0.002", dedupe=True), 2.0)
    assert found.whole is not None
    assert found.whole.copied_images > 0.8 * found.whole.images


def test_a_stop_keeps_what_was_measured(config: RunConfig) -> None:
    stop = Stop(1.0)

    def say(text: str) -> None:
        if text.startswith("the whole"):
            stop.request("enough")

    found = bench(replace(config, model="scripted"), 2.0, stop, say)
    assert found.is_stopped
    assert found.network_alone > 0
    assert found.chosen == found.asked
    assert "stopped: this is what was measured until then" in lines(found, [])


def test_the_findings_are_the_same_for_people_and_programs() -> None:
    whole = Snapshot(seconds=20.0, images=400, vision_seconds=15.0, waiting_seconds=1.0)
    faster = replace(KNOBS, slots=32)
    found = Bench(
        KNOBS,
        faster,
        Tuning(2, 16, 8, 1000),
        loader_alone=80.0,
        network_alone=25.0,
        whole=whole,
        tried=[Tried(faster, 24.0)],
        untried=[replace(KNOBS, slots=8)],
    )
    shown = "\n".join(lines(found, ["--shards", "a b.tar"]))
    assert "waiting for input     5%" in shown
    assert "other                20%" in shown
    assert "the network alone, fed from memory      25.0 images/s" in shown
    assert "vision-bound: 75% of the time in vision" in shown
    assert "captionjob run --shards 'a b.tar' --out captions --slots 32" in shown
    assert "not tried, for want of time (more --seconds): --slots 8" in shown
    as_found = as_json(found, ["--shards", "a b.tar"])
    assert as_found["shares"]["vision"] == 0.75  # type: ignore[index]
    assert as_found["chosen"]["slots"] == 32  # type: ignore[index]
    assert as_found["command"] in shown  # type: ignore[operator]


def test_the_command_line_prints_json_last_and_leaves_nothing(tmp_path: Path) -> None:
    make_photo_shard(tmp_path / "a b.tar", 5)
    words = ["bench", "--shards", "a b.tar", "--model", "scripted:vision=0.01", "--dedupe"]
    done = subprocess.run(
        [sys.executable, "-m", "jobs", *words, "--seconds", "5", "--slots", "4"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    asked = "captionjob run --shards 'a b.tar' --model scripted:vision=0.01 --dedupe --out captions"
    assert found["command"].startswith(asked)
    assert [path.name for path in tmp_path.iterdir()] == ["a b.tar"]
    run = found["command"].replace("'a b.tar'", "x.tar").split()[2:]
    options = cli.commands["run"].make_context("run", run).params
    assert options["slots"] == found["chosen"]["slots"]
    assert options["dedupe"] is True


def test_an_interrupt_ends_it_with_75(tmp_path: Path) -> None:
    make_photo_shard(tmp_path / "a.tar", 5)
    words = ["bench", "--shards", "a.tar", "--model", "scripted:vision=0.01", "--seconds", "12"]
    process = start(words, tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "the whole job" in line:
            break
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors
    assert json.loads(out.splitlines()[-1])["is_stopped"] is True
    assert "Traceback" not in errors


def test_a_wrong_request_is_one_line(tmp_path: Path) -> None:
    process = start(["bench", "--shards", "none.tar"], tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(errors.strip().splitlines()) == 1
