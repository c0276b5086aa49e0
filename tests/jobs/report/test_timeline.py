"""The job's speed over time: what workers counted is all there, in the time it was made in."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from jobs.report.timeline import read_timeline
from pipeline.throughput import THROUGHPUT, Snapshot


def write(out: Path, worker: str, *snapshots: Snapshot, begin: float = 1000.0) -> None:
    (out / THROUGHPUT).mkdir(parents=True, exist_ok=True)
    with (out / THROUGHPUT / f"{worker}.jsonl").open("w") as file:
        for place, one in enumerate(snapshots):
            event = "end" if place + 1 == len(snapshots) else "interval"
            line = {"event": event, "time": begin + one.seconds, "worker": worker}
            print(json.dumps(line | asdict(one)), file=file)


def steady(seconds: float, rate: float = 10.0) -> Snapshot:
    return Snapshot(
        seconds=seconds,
        images=round(rate * seconds),
        decode_seconds=seconds * 0.5,
        waiting_seconds=seconds * 0.25,
        busy_slot_steps=round(6 * seconds),
        total_slot_steps=round(8 * seconds),
        prompt_tokens=round(90 * seconds),
        padding_tokens=round(10 * seconds),
    )


def test_nothing_recorded(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) is None
    write(tmp_path, "a", Snapshot())
    assert read_timeline(tmp_path) is None


def test_a_steady_worker_is_a_level_line(tmp_path: Path) -> None:
    write(tmp_path, "a", *(steady(10.0 * place) for place in range(1, 31)))
    found = read_timeline(tmp_path)
    assert found is not None
    assert len(found.seconds) == 30
    assert found.images_per_second == pytest.approx(np.full(30, 10.0))
    assert found.stages["decode"] == pytest.approx(np.full(30, 0.5))
    assert found.stages["waiting"] == pytest.approx(np.full(30, 0.25))
    assert found.slots_busy == pytest.approx(np.full(30, 0.75))
    assert found.padding == pytest.approx(np.full(30, 0.1))
    assert found.total.images_per_second == pytest.approx(10)


def test_workers_add_up_and_a_pause_is_a_gap(tmp_path: Path) -> None:
    lines = [steady(10.0 * place) for place in range(1, 11)]
    write(tmp_path, "a", *lines)
    write(tmp_path, "b", *lines)
    write(tmp_path, "c", *lines, begin=1200.0)
    found = read_timeline(tmp_path)
    assert found is not None
    rates = found.images_per_second
    assert rates[:10] == pytest.approx(np.full(10, 20.0))
    assert np.isnan(rates[10:20]).all()
    assert rates[20:30] == pytest.approx(np.full(10, 10.0))
    assert found.num_workers == 3


def test_a_long_job_has_few_slices_and_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a", *(steady(10.0 * place) for place in range(1, 2001)))
    found = read_timeline(tmp_path)
    assert found is not None
    assert len(found.seconds) <= 121
    width = found.seconds[1] - found.seconds[0]
    assert np.nansum(found.images_per_second) * width == pytest.approx(200_000, rel=0.02)


def test_one_short_run_is_one_slice(tmp_path: Path) -> None:
    write(tmp_path, "a", steady(0.5))
    found = read_timeline(tmp_path)
    assert found is not None
    assert found.images_per_second == pytest.approx([10.0])
