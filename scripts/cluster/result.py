"""What one scenario of `scripts/cluster-test` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario: what was broken on purpose, and what came of it."""

    name: str  # such as "slurm: a node killed"
    is_ok: bool  # the rows are those of a single-process run, and nothing else went wrong
    rows: int  # rows of the output at the end
    retries: int  # starts beyond the first, of tasks, requests or uploads
    seconds: float  # from start to end
    seconds_lost: float  # of these, lost to the fault; 0 where nothing was broken
    detail: str = ""  # a line for people: what was seen, or why it failed
