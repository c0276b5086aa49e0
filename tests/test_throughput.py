"""Counters to JSON lines, and to words that say what bounds a job."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.throughput import Snapshot, ThroughputLog, Tuning, table, verdict

TUNING = Tuning(loader_workers=4, slots=64, prefill_batch=16, commit_rows=1000)
BUSY = {"seconds": 100.0, "images": 1000, "new_tokens": 12000}


def test_each_line_is_json_with_time_and_worker(tmp_path: Path) -> None:
    log = ThroughputLog(tmp_path, "00003-x")
    log.write(Snapshot(seconds=1.0, images=2), "interval", 10.0)
    log.write(Snapshot(seconds=2.0, images=5), "end", 11.5)
    log.close()
    lines = (tmp_path / "_throughput" / "00003-x.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in lines)
    assert (first["event"], last["event"]) == ("interval", "end")
    assert (last["time"], last["worker"], last["images"]) == (11.5, "00003-x", 5)
    assert {one.name for one in fields(Snapshot)} <= last.keys()


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"waiting_seconds": 41.0}, "loader-bound: the network waited 41% of the time"),
        ({"waiting_seconds": 41.0}, "try --loader-workers 8"),
        ({"writing_seconds": 30.0}, "writer-bound"),
        ({"vision_seconds": 80.0}, "80% of it in vision"),
        (
            {"decode_seconds": 80.0, "busy_slot_steps": 9, "total_slot_steps": 10},
            "try --slots 128",
        ),
        ({"prefill_seconds": 80.0, "prompt_tokens": 6, "padding_tokens": 4}, "--prefill-batch 8"),
        ({"seconds": 1.0}, "too short"),
        ({"images": 0}, "nothing was captioned"),
    ],
)
def test_the_verdict_says_what_bounds_the_job(counters: dict[str, float], words: str) -> None:
    assert words in verdict(Snapshot(**{**BUSY, **counters}), TUNING)  # type: ignore[arg-type]


def test_rates_count_this_runs_work_alone() -> None:
    snapshot = Snapshot(seconds=10.0, images=50, new_tokens=500, resumed_rows=100_000)
    names, values, _ = table(snapshot, TUNING)
    assert names.split()[:2] == ["images/s", "tokens/s"]
    assert values.split()[:2] == ["5.0", "50"]


def test_no_work_divides_by_nothing() -> None:
    assert table(Snapshot(), TUNING)[1].split()[0] == "0.0"
