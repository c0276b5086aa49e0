"""Mutated pictures give an image or a SampleError each; `scripts/fuzz-images` runs for longer."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.fuzzing import MAX_SECONDS, check, fuzz, seed_pictures
from tests.mutations import mutate, with_right_sums

SECONDS = 8


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_mutated_pictures_give_an_image_or_a_sample_error_quickly_in_little_memory(
    tmp_path: Path,
) -> None:
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for name, data in seed_pictures().items():
        (seeds / name.replace(" ", "-").replace(";", "")).write_bytes(data)
    found = fuzz(seeds, SECONDS, seed=0, folder=tmp_path)
    assert not found.faults, found.faults
    assert found.num_pictures > 300
    assert found.results["ok"] > 10
    assert found.results["unreadable"] > 10
    assert found.slowest < MAX_SECONDS
    assert found.grown_mb < 500


def test_every_seed_is_opened_as_it_is() -> None:
    codes = {name: check(data) for name, data in seed_pictures().items()}
    assert {name: code for name, code in codes.items() if code != "ok"} == {}


def test_a_mutation_depends_on_its_seed_alone_and_keeps_the_sums_of_a_png_right() -> None:
    data = seed_pictures()["PNG"]
    found = [mutate(random.Random(seed), data, data) for seed in range(50)]
    assert found == [mutate(random.Random(seed), data, data) for seed in range(50)]
    assert len(set(found)) > 45
    assert with_right_sums(data) == data
