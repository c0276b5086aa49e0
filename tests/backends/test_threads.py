"""Threads are those asked for, or those that a trial found to be fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.config import RunConfig
from jobs.display import Silent
from jobs.run import Run
from pipeline.backends import threads
from pipeline.backends.threads import (
    MAX_WEIGHTS,
    Threads,
    choose_threads,
    is_small_network,
)
from pipeline.captioner import SpeedSettings
from pipeline.fixtures import make_image_bytes, make_tar_bytes

CPU = torch.device("cpu")


class Machine:
    """Torch's threads, and trials that take as long as their number says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.number = max(seconds)
        self.tried: list[int] = []
        self._seconds = seconds
        self._now = 0.0
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.number)
        monkeypatch.setattr(torch, "set_num_threads", self._set)
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self._now)

    def _set(self, number: int) -> None:
        self.number = number

    def trial(self) -> None:
        self.tried.append(self.number)
        self._now += self._seconds[self.number]


@pytest.mark.parametrize(
    ("seconds", "chosen", "last_tried"),
    [
        ({8: 0.4, 4: 0.2, 2: 0.3, 1: 0.5}, 4, 2),
        ({8: 0.4, 4: 0.3, 2: 0.2, 1: 0.1}, 1, 1),
        ({8: 0.1, 4: 0.2, 2: 0.4, 1: 0.8}, 8, 4),
        ({6: 0.2, 3: 0.1, 1: 0.3}, 3, 1),
        ({2: 0.100, 1: 0.098}, 2, 1),
    ],
)
def test_the_fastest_number_is_taken_if_it_is_faster_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int, last_tried: int
) -> None:
    machine = Machine(monkeypatch, seconds)
    found = choose_threads(0, CPU, machine.trial, is_small=True)
    assert found.chosen == machine.number == chosen
    assert machine.tried[-1] == last_tried, "and no fewer were tried once it got slower"


@pytest.mark.parametrize(
    ("asked", "device", "is_small"),
    [(3, CPU, True), (0, torch.device("cuda"), True), (0, CPU, False)],
)
def test_nothing_is_tried_where_the_number_is_known(
    monkeypatch: pytest.MonkeyPatch, asked: int, device: torch.device, is_small: bool
) -> None:
    machine = Machine(monkeypatch, {8: 0.1})
    found = choose_threads(asked, device, machine.trial, is_small=is_small)
    assert found.chosen == machine.number == (asked or 8)
    assert not machine.tried


def test_a_network_is_small_by_its_weights() -> None:
    assert is_small_network(torch.nn.Linear(2, 2))
    assert not is_small_network(torch.nn.Linear(MAX_WEIGHTS, 1, device="meta"))
    assert not is_small_network(object())


def test_the_choice_says_by_how_much_it_is_faster() -> None:
    assert (
        str(Threads(4, {8: 0.4, 4: 0.2, 2: 0.3})) == "4 threads (measured: 1.50 times as fast as 2)"
    )
    assert str(Threads(1)) == "1 thread"


class Said(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(("asked", "words"), [(1, ", 1 thread"), (0, " thread")])
def test_the_line_that_says_loaded_says_how_many_threads(
    tmp_path: Path, asked: int, words: str
) -> None:
    before = torch.get_num_threads()
    (tmp_path / "a.tar").write_bytes(make_tar_bytes([("a.jpg", make_image_bytes(seed=1))]))
    said = Said()
    config = RunConfig(
        shards=(str(tmp_path / "a.tar"),),
        out=tmp_path / "out",
        speed=SpeedSettings(slots=2, prefill_batch=1, threads=asked),
    )
    try:
        assert Run(config, display=said).run().exit_code == 0
    finally:
        torch.set_num_threads(before)
    (line,) = (line for line in said.lines if line.startswith("loaded"))
    assert words in line
