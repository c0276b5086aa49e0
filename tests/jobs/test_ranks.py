"""Who a worker is: each engine's own words, in their order, and never by halves."""

from __future__ import annotations

import os

import pytest

from jobs.ranks import Place, find_place
from jobs.sharing import device_of, loaders_of, num_cores, threads_of
from pipeline.errors import RequestError

ARRAY = {
    "SLURM_ARRAY_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "1",
    # What an allocation tells to everybody:
    "SLURM_JOB_ID": "80",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
}
STEP = {
    "SLURM_JOB_ID": "80",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4(x1),2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "OMP_NUM_THREADS": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "CAPTIONJOB_WORLD_SIZE": "9"}
BATCH = {
    "AWS_BATCH_JOB_ID": "1f2e:4",
    "AWS_BATCH_JOB_ARRAY_INDEX": "4",
    "AWS_BATCH_JOB_ARRAY_SIZE": "10",
}
NODES = {
    "AWS_BATCH_JOB_ID": "1f2e#1",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}
POOL = {"SKYPILOT_JOB_RANK": "2", "SKYPILOT_NUM_JOBS": "5"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, Place()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, Place()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "80"}, Place()),
        ({"CAPTIONJOB_RANK": "1", "CAPTIONJOB_WORLD_SIZE": "2"}, Place(1, 2, "CAPTIONJOB_RANK")),
        (TORCHRUN, Place(5, 8, "torchrun", 1, 4, "abc")),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, Place(5, 8, "torchrun", 1, 4)),
        (TORCHRUN | STEP, Place(5, 8, "torchrun", 1, 4, "abc")),
        (ARRAY, Place(3, 8, "Slurm array", job="77")),
        (
            ARRAY | {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "8"},
            Place(2, 8, "Slurm array", job="77"),
        ),
        (
            ARRAY
            | {
                "SLURM_ARRAY_TASK_ID": "8",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MAX": "8",
                "SLURM_ARRAY_TASK_STEP": "4",
            },
            Place(2, 3, "Slurm array", job="77"),
        ),
        (STEP, Place(5, 6, "Slurm step", 1, 2, "80")),
        (ARRAY | STEP, Place(3 * 6 + 5, 8 * 6, "Slurm step of array", 1, 2, "77")),
        (KUBERNETES, Place(2, 9, "Kubernetes index")),
        (BATCH, Place(4, 10, "AWS Batch array", job="1f2e")),
        (NODES, Place(1, 3, "AWS Batch nodes", job="1f2e")),
        (SKY, Place(1, 3, "SkyPilot")),
        (POOL, Place(2, 5, "SkyPilot")),
        (SKY | POOL, Place(2 * 3 + 1, 15, "SkyPilot")),
        (ARRAY | {"JOB_COMPLETION_INDEX": "2"}, Place(3, 8, "Slurm array", job="77")),
    ],
)
def test_each_engine_tells_the_rank_in_its_own_words(
    environ: dict[str, str], wanted: Place
) -> None:
    assert find_place(None, None, environ) == wanted


@pytest.mark.parametrize("environ", [TORCHRUN, ARRAY, STEP, KUBERNETES, BATCH, SKY])
def test_options_come_before_every_engine(environ: dict[str, str]) -> None:
    found = find_place(6, 7, environ)
    assert (found.rank, found.world_size, found.source) == (6, 7, "options")


HOLES = ARRAY | {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_COUNT": "2",
    "SLURM_ARRAY_TASK_MIN": "3",
}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (HOLES, "has holes: 2 tasks from 3 to 7"),
        (TORCHRUN | ARRAY, "torchrun inside a Slurm array"),
        ({"JOB_COMPLETION_INDEX": "2"}, "CAPTIONJOB_WORLD_SIZE"),
        (KUBERNETES | {"CAPTIONJOB_WORLD_SIZE": "2"}, "worker 2 of 2"),
        ({"CAPTIONJOB_RANK": "2"}, "CAPTIONJOB_WORLD_SIZE is not"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "2"}, "AWS_BATCH_JOB_ARRAY_SIZE"),
        ({"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NUM_NODES"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "WORLD_SIZE is ''"),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "-3"}, "SLURM_ARRAY_TASK_ID is '-3'"),
    ],
)
def test_a_rank_that_is_told_by_halves_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_place(None, None, environ)


@pytest.mark.parametrize("environ", [HOLES, TORCHRUN | ARRAY, {"JOB_COMPLETION_INDEX": "2"}])
def test_who_takes_shards_by_lease_needs_no_exact_rank(environ: dict[str, str]) -> None:
    found = find_place(None, None, environ, is_claiming=True)
    assert 0 <= found.rank < found.world_size


def test_workers_of_one_machine_share_its_cores_and_take_a_device_each() -> None:
    alone, two = Place(), Place(1, 2, local_rank=1, local_size=2)
    assert threads_of(alone, {}) == 0
    assert threads_of(two, {"OMP_NUM_THREADS": "1"}) == max(1, num_cores() // 2)
    assert threads_of(two, {"OMP_NUM_THREADS": "6"}) == 0
    assert loaders_of(two) == max(2, min(8, num_cores() // 2))
    assert (device_of("auto", alone), device_of("auto", two)) == ("auto", "auto@1")
    assert device_of("cuda:0", two) == "cuda:0"


def test_the_engine_is_read_from_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ARRAY.items():
        monkeypatch.setenv(name, value)
    assert find_place(None, None, os.environ).rank == 3
