"""The laws on a real GPU, where there is one: exact in float64, captured, and never waiting."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.models.tiny import TinyModel
from tests.engine.laws import DEVICE, EOS, Settings, make_engine, rules_of
from tests.engine.test_late import DRAWN, GREEDY, REQUESTS, answers, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
GPU = torch.device("cuda", 0)


def engine_on(device: torch.device, sampling: SamplingSettings) -> Engine:
    settings = Settings(slots=6, sampling=sampling)
    shape = EngineShape(6, 3, 40, torch.float64, device)
    model = TinyModel().double().eval().to(device)
    return Engine(model, shape, sampling, rules_of(settings, EOS))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Make torch raise where it would have to wait for the GPU, but for an event."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_gpu_gives_the_captions_of_a_processor(sampling: SamplingSettings) -> None:
    wanted = answers(run(make_engine(Settings(slots=6, sampling=sampling)), REQUESTS))
    engine = engine_on(GPU, sampling)
    found = answers(run(engine, REQUESTS))
    assert found == wanted
    assert engine.notices == [], "a step could not be captured"
    assert engine.counters.decode_seconds > 0


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_gpu_is_waited_for_by_nothing_but_the_reading_of_tokens(
    sampling: SamplingSettings,
) -> None:
    """Twice the same job, so that all shapes are captured; then once more under watch."""
    engine = engine_on(GPU, sampling)
    jobs = [answers(run(engine, REQUESTS)) for _ in range(2)]
    with nothing_waits():
        jobs.append(answers(run(engine, REQUESTS)))
    assert jobs[0] == jobs[1] == jobs[2]
    assert engine.notices == []


def test_a_processor_in_the_same_process_is_driven_as_before() -> None:
    engine = engine_on(DEVICE, GREEDY)
    assert answers(run(engine, REQUESTS)) == answers(run(make_engine(Settings(slots=6)), REQUESTS))
