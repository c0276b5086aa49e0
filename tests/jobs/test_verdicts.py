"""The summary of a real run names what was made slow in it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import pipeline.verdict
from jobs.config import RunConfig, WorkerSettings
from jobs.result import summary
from jobs.run import Run
from pipeline.captioner import SpeedSettings
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.output.store import CommitSettings, Store
from pipeline.verdict import verdict

NUM_IMAGES = 120


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(pipeline.verdict, "MIN_SECONDS", 0.0)
    data = make_image_bytes(seed=1)
    members = [(f"{place:03d}.jpg", data) for place in range(NUM_IMAGES)]
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    return RunConfig(
        shards=(str(tmp_path),),
        out=tmp_path / "out",
        worker=WorkerSettings(loader_workers=2),
        speed=SpeedSettings(slots=16, prefill_batch=8),
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("scripted:open=0.02", "loader-bound: the network waited"),
        ("scripted:open=0.03,latency=0.03", "loader-bound: slots were busy"),
        ("scripted:vision=0.008", "vision-bound"),
        ("scripted:prefill=0.05", "prefill-bound"),
        ("scripted:latency=0.02", "decode-bound"),
    ],
)
def test_the_summary_names_the_slow_stage(config: RunConfig, model: str, words: str) -> None:
    result = Run(replace(config, model=model)).run()
    assert words in "\n".join(summary(result)), result.snapshot


def test_a_slow_disk_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Store._commit_piece

    def slow(store: Store, *arguments: object) -> None:
        with store._writing():
            time.sleep(0.02)
        add(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "_commit_piece", slow)
    slow_disk = replace(config, model="scripted:latency=0.001", commit=CommitSettings(rows=4))
    result = Run(slow_disk).run()
    assert verdict(result.snapshot, result.tuning).startswith("writer-bound")


def test_a_job_with_too_few_images_is_not_blamed_on_the_loader(config: RunConfig) -> None:
    few = replace(
        config, model="scripted:latency=0.02", speed=SpeedSettings(slots=600, prefill_batch=8)
    )
    result = Run(few).run()
    assert "too few requests" in verdict(result.snapshot, result.tuning)
