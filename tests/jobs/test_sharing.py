"""Several workers on few shards: together they make each row once, whoever comes or goes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.config import RunConfig, WorkerSettings
from jobs.ranks import Place
from jobs.result import RunResult
from jobs.run import Run
from jobs.stopping import Stop
from pipeline.captioner import SpeedSettings
from pipeline.fixtures import make_photo_shard
from pipeline.output.store import CommitSettings

COUNTS = (40, 3)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for place, count in enumerate(COUNTS):
        make_photo_shard(tmp_path / f"{place}.tar", count, seed=place)
    return RunConfig(
        shards=(str(tmp_path),),
        out=tmp_path / "out",
        model="scripted:shuffle=5",
        commit=CommitSettings(rows=7),
        worker=WorkerSettings(loader_workers=2),
        speed=SpeedSettings(slots=8, prefill_batch=4),
    )


def as_worker(config: RunConfig, rank: int, world_size: int) -> RunConfig:
    return replace(config, worker=WorkerSettings(Place(rank, world_size), 1))


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.parquet")}


def wanted_of(config: RunConfig) -> dict[str, bytes]:
    alone = replace(config, out=config.out.parent / "alone")
    assert Run(alone).run().exit_code == 0
    return files_of(alone.out)


@pytest.mark.parametrize("world_size", [2, 3, 8, 60])
def test_workers_one_after_another_make_the_same_files(config: RunConfig, world_size: int) -> None:
    wanted = wanted_of(config)
    images = []
    for rank in range(world_size):
        is_done = sum(images) == sum(COUNTS)  # there are more workers than images
        assert (files_of(config.out).keys() >= wanted.keys()) == is_done
        result = Run(as_worker(config, rank, world_size)).run()
        assert result.exit_code == 0
        images.append(result.snapshot.images)
    assert sum(images) == sum(COUNTS), "nobody captioned what was another's"
    assert max(images) <= sum(COUNTS) / world_size + 6
    assert files_of(config.out) == wanted
    assert not (config.out / "_progress").exists()


def test_workers_at_once_make_the_same_files(config: RunConfig) -> None:
    wanted = wanted_of(config)
    results: list[RunResult] = []
    workers = [as_worker(config, rank, 4) for rank in range(4)]
    threads = [
        threading.Thread(target=lambda one=one: results.append(Run(one).run())) for one in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.exit_code for result in results] == [0] * 4
    assert sum(result.snapshot.images for result in results) == sum(COUNTS)
    assert files_of(config.out) == wanted


def test_another_world_size_goes_on_with_what_is_there(config: RunConfig) -> None:
    wanted = wanted_of(config)
    first = Run(as_worker(config, 1, 4)).run()
    stop = Stop()
    stopped = Run(as_worker(config, 2, 4), stop)
    stop.request("a test")
    assert stopped.run().exit_code == 75
    rest = [Run(as_worker(config, rank, 3)).run() for rank in (2, 0, 1)]
    images = [result.snapshot.images for result in (first, *rest)]
    assert sum(images) == sum(COUNTS), "no row was made twice"
    assert files_of(config.out) == wanted


def test_a_worker_that_ends_says_that_its_shard_waits_for_others(config: RunConfig) -> None:
    result = Run(as_worker(config, 0, 4)).run()
    assert (result.exit_code, result.num_shared) == (0, 1)


def test_retried_rows_are_shared_out_too(config: RunConfig) -> None:
    config = replace(config, model="scripted:fail=7")
    wanted = wanted_of(config)
    assert Run(config).run().exit_code == 0
    retry = replace(config, retry=frozenset({"error"}))
    images = [Run(as_worker(retry, rank, 3)).run().snapshot.images for rank in range(3)]
    num_errors = sum(
        pq.read_table(path).column("status").to_pylist().count("error")
        for path in config.out.glob("*.parquet")
    )
    assert sum(images) == num_errors > 1
    assert files_of(config.out).keys() == wanted.keys()
    assert not (config.out / "_retry").exists()
