"""Counters to JSON lines, and the rates that follow from them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.output.folder import open_folder
from pipeline.throughput import Snapshot, ThroughputLog


def test_each_line_is_json_with_time_and_worker(tmp_path: Path) -> None:
    log = ThroughputLog(open_folder(tmp_path), "00003-x")
    log.write(Snapshot(seconds=1.0, images=2), "interval", 10.0)
    log.write(Snapshot(seconds=2.0, images=5), "end", 11.5)
    log.close()
    lines = (tmp_path / "_throughput" / "00003-x.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in lines)
    assert (first["event"], last["event"]) == ("interval", "end")
    assert (last["time"], last["worker"], last["images"]) == (11.5, "00003-x", 5)
    assert {one.name for one in fields(Snapshot)} <= last.keys()


def test_rates_count_what_was_captioned_in_this_run_alone() -> None:
    snapshot = Snapshot(seconds=10.0, images=50, copied_images=20, resumed_rows=100_000)
    assert snapshot.images_per_second == 3.0
    assert snapshot.finished_per_second == 5.0


def test_what_was_done_between_two_moments_is_their_difference() -> None:
    early = Snapshot(seconds=10.0, images=50, vision_seconds=4.0)
    late = Snapshot(seconds=30.0, images=90, vision_seconds=14.0)
    between = late - early
    assert (between.seconds, between.images) == (20.0, 40)
    assert between.share(between.vision_seconds) == 0.5


def test_what_no_stage_accounts_for_is_other() -> None:
    snapshot = Snapshot(seconds=10.0, waiting_seconds=1, vision_seconds=2, prefill_seconds=1.5)
    assert snapshot.other_share == pytest.approx(0.55)
    assert Snapshot().other_share == 0.0
