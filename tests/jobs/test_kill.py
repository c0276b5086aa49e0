"""Killed at any instruction and restarted: the same bytes, none lost, none twice (law 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import torture

KILLS = 10


@pytest.mark.parametrize(("seed", "num_captions"), [(1, 1), (2, 2), (3, 1)])
def test_killed_jobs_end_with_the_files_of_an_untroubled_run(
    tmp_path: Path, seed: int, num_captions: int
) -> None:
    tally = torture(tmp_path / "torture", KILLS, seed, num_captions)
    assert tally.kills >= KILLS
    assert tally.rows > 0
    assert not tally.faults
