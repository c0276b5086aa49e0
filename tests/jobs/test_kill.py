"""Killed at any instruction and restarted: the same bytes, none lost, none twice (law 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import torture

KILLS = 7  # of each; `scripts/torture` is the long run


@pytest.mark.parametrize(
    ("seed", "num_captions", "is_deduping"), [(1, 1, False), (2, 2, False), (3, 2, True)]
)
def test_killed_jobs_end_with_the_files_of_an_untroubled_run(
    tmp_path: Path, seed: int, num_captions: int, is_deduping: bool
) -> None:
    tally = torture(tmp_path / "torture", KILLS, seed, num_captions, is_deduping=is_deduping)
    assert tally.kills >= KILLS
    assert tally.rows > 0
    assert not tally.faults
