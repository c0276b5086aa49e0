"""Counters to a sentence that says what bounds a job, and what to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.throughput import Snapshot
from pipeline.verdict import Tuning, table, verdict

TUNING = Tuning(
    loader_workers=4, slots=64, prefill_batch=16, commit_rows=1000, dtype="float32", cores=8
)
FULL = {"busy_slot_steps": 95, "total_slot_steps": 100}
BUSY = {"seconds": 100.0, "images": 1000, "new_tokens": 12000, "decode_seconds": 30.0, **FULL}
THIN = {"busy_slot_steps": 12, "total_slot_steps": 100, "decode_seconds": 90.0}


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        (
            {"waiting_seconds": 41.0},
            "loader-bound: the network waited 41% of the time; try --loader-workers 8",
        ),
        (
            {"waiting_seconds": 41.0, "cpu_seconds": 780.0},
            "all 8 cores are busy, so smaller pictures would help, more loaders would not",
        ),
        (
            {"starved_seconds": 90.0, **THIN},
            "loader-bound: slots were busy 12%, for want of requests; try --loader-workers 8",
        ),
        ({"starved_seconds": 90.0, "decode_seconds": 90.0}, "decode-bound"),
        (
            {"writing_seconds": 30.0},
            "writer-bound: 30% of the time went into writing; try --commit-rows 4000",
        ),
        ({"writing_seconds": 30.0, "waiting_seconds": 20.0}, "writer-bound"),
        ({"writing_seconds": 20.0, "waiting_seconds": 30.0}, "loader-bound"),
        (
            {"vision_seconds": 60.0},
            "vision-bound: 60% of the time in vision; try a faster device, or --dtype bfloat16",
        ),
        (
            {"prefill_seconds": 60.0, "prompt_tokens": 96, "padding_tokens": 4},
            "prefill-bound: 60% of the time in prefill; try a shorter --prompt",
        ),
        (
            {"prefill_seconds": 60.0, "prompt_tokens": 60, "padding_tokens": 40},
            "prefill-bound: 60% of the time in prefill; 40% of prefill was padding; "
            "try --prefill-batch 8",
        ),
        (
            {"decode_seconds": 80.0},
            "decode-bound: 80% of the time in decode; try --slots 128 if memory allows",
        ),
        (
            THIN,
            "decode-bound: 90% of the time in decode; slots were busy 12%, "
            "there were too few requests to fill them",
        ),
        ({"seconds": 1.0}, "too short a run"),
        ({"images": 0}, "nothing was captioned"),
    ],
)
def test_the_verdict_says_what_bounds_the_job(counters: dict[str, float], words: str) -> None:
    assert words in verdict(Snapshot(**{**BUSY, **counters}), TUNING)  # type: ignore[arg-type]


def test_no_width_of_numbers_is_asked_for_that_is_there_already() -> None:
    snapshot = Snapshot(seconds=100.0, images=1000, vision_seconds=60.0)
    assert "bfloat16" not in verdict(snapshot, replace(TUNING, dtype="bfloat16"))


def test_a_prefill_of_one_prompt_cannot_be_made_smaller() -> None:
    snapshot = Snapshot(
        seconds=100.0, images=9, prefill_seconds=60.0, prompt_tokens=6, padding_tokens=4
    )
    assert "--prefill-batch" not in verdict(snapshot, replace(TUNING, prefill_batch=1))


def test_the_table_counts_copies_apart() -> None:
    snapshot = Snapshot(seconds=10.0, images=50, new_tokens=500, resumed_rows=100_000)
    names, values, _ = table(snapshot, TUNING)
    assert names.split()[:2] == ["images/s", "tokens/s"]
    assert values.split()[:2] == ["5.0", "50"]
    names, values, _ = table(replace(snapshot, copied_images=20), TUNING)
    assert names.split()[:3] == ["images/s", "copied/s", "tokens/s"]
    assert values.split()[:3] == ["3.0", "2.0", "50"]


def test_no_work_divides_by_nothing() -> None:
    assert table(Snapshot(), TUNING)[1].split()[0] == "0.0"
