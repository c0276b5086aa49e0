"""Leases: each unit is taken by one, the dead are succeeded, and nobody fights for a shard."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import stream
from jobs.claiming import Claims, ClaimSettings
from jobs.config import RunConfig, WorkerSettings
from jobs.plan import Plan
from jobs.ranks import Place
from jobs.result import RunResult
from jobs.run import Run
from jobs.stopping import Stop, StopClock
from pipeline.captioner import SpeedSettings
from pipeline.errors import JobError, RequestError
from pipeline.fixtures import make_photo_shard
from pipeline.input.dealing import Slice, units
from pipeline.input.shards import expand_shards
from pipeline.output import leases
from pipeline.output.leases import CLAIMS, ClaimNames, Lease
from pipeline.output.local import LocalFolder
from pipeline.records import Sample, Shard
from pipeline.throughput import ThroughputLog
from scripts.cluster.simulate_claims import Outcome, Scene, Simulation
from scripts.cluster.simulated import Latencies, SimulatedFolder
from tests.commands import captionjob, start
from tests.jobs.test_sharing import COUNTS, config, files_of, wanted_of

assert config  # the fixture of few shards


class HandClock:
    """A clock that goes when a test says so, or when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> bool:
        self.time += seconds
        return self.time < 10_000


UNITS = [Slice(Shard(f"s{i}-0a", f"/s{i}.tar")) for i in range(6)]


def claims_of(folder: LocalFolder, name: str, start: int = 0, job: str = "") -> Claims:
    return Claims(folder, UNITS, name, HandClock(), job=job, start=start)


def finish(folder: LocalFolder, claims: Claims, unit: Slice) -> None:
    folder.create_if_absent(f"{unit.shard.id}.parquet", b"")
    claims.finish(unit)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path)


def test_of_two_workers_each_unit_has_one(folder: LocalFolder) -> None:
    one, two = claims_of(folder, "one"), claims_of(folder, "two", start=3)
    taken = []
    for _ in UNITS[::2]:
        for claims in (one, two):
            unit = claims.take()
            assert unit is not None
            taken.append(unit.id)
            finish(folder, claims, unit)
    assert sorted(taken) == [unit.id for unit in UNITS]
    assert one.take() is two.take() is None
    assert one.counters.misses + two.counters.misses <= len(UNITS)
    assert folder.names(CLAIMS) == []


def test_workers_begin_where_nobody_is(folder: LocalFolder) -> None:
    one, two = claims_of(folder, "one"), claims_of(folder, "two", start=3)
    first, second = one.take(), two.take()
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == ("s0-0a", "s3-0a")


def test_a_silent_lease_is_taken_over_and_a_living_one_is_not(folder: LocalFolder) -> None:
    dead, alive = claims_of(folder, "dead"), claims_of(folder, "alive", start=3)
    lost = dead.take()
    living = [alive.take() for _ in range(5)]
    assert len(living) == 5
    heir = claims_of(folder, "heir")
    clock = heir._clock
    assert isinstance(clock, HandClock)
    sleep = clock.sleep

    def sleep_and_beat(seconds: float) -> bool:
        alive.beat()
        return sleep(seconds)

    clock.sleep = sleep_and_beat  # type: ignore[method-assign]
    assert heir.take() == lost
    assert clock.time >= heir.settings.lease_seconds
    assert heir.counters.taken_over == 1
    dead.beat()
    assert dead.counters.lost == 1
    assert lost is not None
    dead.release_all()
    assert folder.names(CLAIMS).count(Lease(lost.id, 2).name.rpartition("/")[2]) == 1


def test_no_clock_but_the_observers_own_decides(folder: LocalFolder) -> None:
    """Times of change in the far future or past make nobody dead or alive."""
    dead = claims_of(folder, "dead")
    lost = dead.take()
    for name in folder.names(CLAIMS):
        os.utime(folder.path / CLAIMS / name, (10**10, 10**10))
    heir = claims_of(folder, "heir")
    for unit in UNITS[1:]:
        assert heir.take() is not None, unit
    assert heir.take() == lost


def test_a_stop_gives_leases_back_at_once(folder: LocalFolder) -> None:
    one = claims_of(folder, "one")
    with one.held():
        assert one.take() is not None
        assert one.take() is not None
        assert len(folder.names(CLAIMS)) == 2
        for unit in UNITS[2:]:
            folder.create_if_absent(f"{unit.shard.id}.parquet", b"")
    assert all(name.endswith(".free") for name in folder.names(CLAIMS))
    two = claims_of(folder, "two")
    for unit in UNITS[:2]:
        assert two.take() == unit
        finish(folder, two, unit)
    assert two.take() is None
    assert two.counters.idle_seconds == 0
    assert folder.names(CLAIMS) == []


def test_a_stop_ends_the_wait_for_others(folder: LocalFolder) -> None:
    one = claims_of(folder, "one")
    assert [one.take() for _ in UNITS]
    stop = Stop()
    two = Claims(folder, UNITS, "two", StopClock(stop))
    taken: list[Slice | None] = [UNITS[0]]
    thread = threading.Thread(target=lambda: taken.append(two.take()))
    thread.start()
    time.sleep(0.3)
    assert len(taken) == 1
    stop.request("a test")
    thread.join(timeout=5)
    assert taken[1:] == [None]


def test_what_cannot_be_read_is_tried_once_a_job_and_again_by_the_next(
    folder: LocalFolder,
) -> None:
    one, two = claims_of(folder, "one", job="7"), claims_of(folder, "two", job="7")
    bad = one.take()
    assert bad is not None
    one.fail(bad)
    rest = [two.take() for _ in UNITS[1:]]
    assert bad not in rest
    assert None not in rest
    for unit in rest:
        assert unit is not None
        finish(folder, two, unit)
    assert two.take() is None
    again = claims_of(folder, "again", job="7")
    assert again.take() is None, "a worker that was started again in the same job"
    rerun = claims_of(folder, "rerun", job="8")
    assert rerun.take() == bad
    assert ClaimNames.of(folder.names(CLAIMS)).failed == {}


def test_slices_wait_for_each_other_and_a_shard_without_file_is_looked_at_again(
    folder: LocalFolder,
) -> None:
    cut = units([Shard("s-0a", "/s.tar")], 2)
    assert len(cut) == 8
    one = Claims(folder, cut, "one", HandClock())
    for unit in cut[:7]:
        assert one.take() == unit
        one.finish(unit)
    assert one.take() == cut[7]
    one.finish(cut[7])  # committed; whoever was to make the file has died
    two = Claims(folder, cut, "two", HandClock())
    again = two.take()
    assert again is not None
    finish(folder, two, again)
    assert two.take() is None
    assert folder.names(CLAIMS) == []


def test_a_file_whose_maker_died_before_it_said_so_keeps_nobody_waiting(
    folder: LocalFolder,
) -> None:
    """Its lease falls silent, and the slices beside it would be waited for, for ever."""
    cut = units([Shard("s-0a", "/s.tar")], 2)
    one, dead = (Claims(folder, cut, name, HandClock()) for name in ("one", "dead"))
    for unit in cut[:7]:
        assert one.take() == unit
        one.finish(unit)
    assert dead.take() == cut[7]
    folder.create_if_absent("s-0a.parquet", b"")
    assert one.take() is None
    clock = one._clock
    assert isinstance(clock, HandClock)
    assert clock.time < 2 * one.settings.lease_seconds


def test_names_that_are_no_claims_are_left_out() -> None:
    found = ClaimNames.of(["s.0002", "s.0001", "t.failed-ab", "u.done", "x.txt", "y", ".0001"])
    assert (found.held, found.failed, found.done) == ({"s": 2}, {"t": {"ab"}}, {"u"})
    assert leases.holder_of(b'{"worker": "w"}') == "w"
    assert leases.holder_of(b"[]") == ""


def check_simulation(outcome: Outcome, scene: Scene) -> None:
    """Assert what must hold of every simulated job."""
    assert outcome.done == scene.shards
    assert outcome.claims_left == 0
    assert outcome.seconds < 2.5 * scene.fair_seconds
    assert sum(outcome.requests.values()) < 40 * scene.shards
    assert outcome.misses < scene.shards


def test_a_hundred_workers_of_whom_many_die_finish_all_shards() -> None:
    scene = Scene(workers=100, shards=1500, die=0.2, preempt=0.2, sleep=0.0)
    outcome = Simulation(scene).run()
    check_simulation(outcome, scene)
    assert outcome.taken_over >= 10
    assert outcome.made_twice == 0
    assert outcome.twice_seconds < 1e-6


def test_workers_that_only_slept_cost_some_work_and_nothing_else() -> None:
    scene = Scene(workers=50, shards=500, die=0.0, preempt=0.0, sleep=0.4)
    outcome = Simulation(scene).run()
    check_simulation(outcome, scene)
    assert 0 < outcome.twice_seconds < 0.1 * outcome.work_seconds


def test_the_simulation_catches_a_lease_that_two_can_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeded mistake: a lease is looked for and then put, as without a conditional put."""

    def look_then_put(self: SimulatedFolder, name: str, data: bytes, point: str = "") -> bool:
        if self.stat(name) is not None:
            return False
        if not name.startswith(CLAIMS):
            return create(self, name, data)
        self.replace(name, data)
        return True

    create = SimulatedFolder.create_if_absent

    def made_twice() -> int:
        simulation = Simulation(Scene(workers=60, shards=20, die=0, preempt=0, sleep=0))
        simulation.store.latencies = Latencies(get=5.0, put=5.0)
        return simulation.run().made_twice

    assert made_twice() == 0
    monkeypatch.setattr(SimulatedFolder, "create_if_absent", look_then_put)
    assert made_twice() > 0


def claiming(config: RunConfig, rank: int = 0, world_size: int = 1) -> RunConfig:
    settings = WorkerSettings(Place(rank, world_size), 1, True, ClaimSettings(1.0))
    return replace(config, worker=settings)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_that_claim_make_the_same_files(config: RunConfig, num_workers: int) -> None:
    wanted = wanted_of(config)
    results: list[RunResult] = []
    workers = [claiming(config, rank, num_workers) for rank in range(num_workers)]
    threads = [
        threading.Thread(target=lambda one=one: results.append(Run(one).run())) for one in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.exit_code for result in results] == [0] * num_workers
    assert sum(result.snapshot.images for result in results) == sum(COUNTS)
    assert files_of(config.out) == wanted
    assert not Path(config.out, CLAIMS).exists()


def test_the_share_of_a_killed_worker_is_picked_up_by_one_that_lives(tmp_path: Path) -> None:
    for place in range(4):
        make_photo_shard(tmp_path / f"{place}.tar", 6, seed=place)
    run = ("run", "--shards", ".", "--out", "out", "--claim", "--lease-seconds", "1")
    slow = (*run, "--model", "scripted:latency=0.15", "--commit-rows", "1", "--slots", "1")
    dead = start(slow, tmp_path)
    while not list(tmp_path.glob("out/_progress/*/*.parquet")):
        time.sleep(0.05)
    dead.send_signal(signal.SIGSTOP)  # as if its machine were gone
    alive = captionjob(*run, "--model", "scripted", cwd=tmp_path)
    assert alive.returncode == 0, alive.stderr
    assert len(list(tmp_path.glob("out/*.parquet"))) == 4
    dead.send_signal(signal.SIGCONT)
    assert dead.wait(timeout=60) == 0, "its twin was first, which is harmless"
    dead.communicate()
    verified = captionjob("verify", "out", "--shards", ".", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout


def test_a_stopped_worker_leaves_no_lease(tmp_path: Path) -> None:
    make_photo_shard(tmp_path / "a.tar", 50)
    run = ("run", "--shards", "a.tar", "--out", "out", "--claim", "--slots", "1")
    process = start((*run, "--model", "scripted:latency=0.2"), tmp_path)
    while not list(tmp_path.glob("out/_claims/*")):
        time.sleep(0.05)
    status = captionjob("status", "out", "--json", cwd=tmp_path)
    (claim,) = json.loads(status.stdout)["claims"]
    assert claim["unit"].startswith("a-")
    assert claim["worker"]
    shown = captionjob("status", "out", cwd=tmp_path).stdout
    assert "claims" in shown
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert [path.suffix for path in tmp_path.glob("out/_claims/*")] == [".free"]
    assert captionjob(*run, "--model", "scripted", cwd=tmp_path).returncode == 0
    assert not list(tmp_path.glob("out/_claims"))


def test_two_workers_do_not_wait_for_each_other(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard's end is told while the loader waits: else its holder and another wait for ever."""
    real = stream.read_shard

    def slow_to_end(*args: object, **options: object) -> Iterator[Sample]:
        yield from real(*args, **options)  # type: ignore[arg-type]
        time.sleep(0.3)  # all captions are there before the end of the shard is known

    monkeypatch.setattr(stream, "read_shard", slow_to_end)
    folder = LocalFolder(Path(config.out))
    shards = expand_shards(config.shards)
    lease = Lease(shards[1].id, 1)
    results: list[RunResult] = []
    worker = replace(config, worker=WorkerSettings(Place(), 1, True))
    thread = threading.Thread(target=lambda: results.append(Run(worker).run()))
    folder.prepare()
    leases.take(folder, lease, "somebody who lives")
    (folder.path / "_job.json").write_text(worker.record(worker.source()).to_json())
    thread.start()
    end = time.monotonic() + 20
    while not (folder.path / f"{shards[0].id}.parquet").exists():
        assert time.monotonic() < end, "it waits for another without telling its own end"
        time.sleep(0.05)
    leases.release(folder, lease, is_over=False)
    thread.join(timeout=30)
    assert results[0].exit_code == 0
    assert results[0].after.num_done == 2


def test_claims_do_not_go_with_what_starts_anew(config: RunConfig) -> None:
    with pytest.raises(RequestError, match="--claim"):
        replace(claiming(config), overwrite=True)
    with pytest.raises(RequestError, match="--lease-seconds"):
        ClaimSettings(0.5)


def test_of_very_many_shards_each_worker_looks_at_its_share(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Run(config).run().exit_code == 0
    states = Plan.make(claiming(config, 1, 2)).before.shards
    assert [(state.is_done, state.num_rows) for state in states] == [(True, 40), (True, 3)]
    monkeypatch.setattr("jobs.plan.MAX_LOOKED_AT", 0)
    states = Plan.make(claiming(config, 1, 2)).before.shards
    assert [(state.is_done, state.num_rows) for state in states] == [(True, 40), (True, 0)]


def test_a_batch_that_is_not_full_does_not_wait_for_other_workers(config: RunConfig) -> None:
    """The networks wait for a full batch; what others hold may never come, or wait for ours."""
    folder = LocalFolder(Path(config.out))
    worker = replace(
        config,
        model="default",
        speed=SpeedSettings(slots=64, prefill_batch=64),
        worker=WorkerSettings(Place(), 1, True),
    )
    folder.prepare()
    (folder.path / "_job.json").write_text(worker.record(worker.source()).to_json())
    shards = expand_shards(config.shards)
    lease = Lease(shards[0].id, 1)
    leases.take(folder, lease, "somebody who lives")
    stop = Stop()
    thread = threading.Thread(target=Run(worker, stop).run)
    thread.start()
    end = time.monotonic() + 60
    while not (folder.path / f"{shards[1].id}.parquet").exists():
        assert time.monotonic() < end, "three images wait for sixty-one more"
        time.sleep(0.05)
    stop.request("the end of the test")
    thread.join(timeout=60)


def test_a_worker_that_waits_for_others_ends_if_its_rows_cannot_be_written(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lives as long as it waits, so that the others would wait for it too."""

    def full(*_: object) -> None:
        if files_of(Path(config.out)):  # all captions are made: it waits
            raise JobError("no space left")

    folder = LocalFolder(Path(config.out))
    worker = replace(config, worker=WorkerSettings(Place(), 1, True))
    folder.prepare()
    (folder.path / "_job.json").write_text(worker.record(worker.source()).to_json())
    leases.take(folder, Lease(expand_shards(config.shards)[1].id, 1), "somebody who lives")
    monkeypatch.setattr("jobs.metering.LOG_SECONDS", 0.1)
    monkeypatch.setattr(ThroughputLog, "write", full)  # by the ticker, while the rest waits
    with pytest.raises(JobError, match="no space left"):
        Run(worker).run()
