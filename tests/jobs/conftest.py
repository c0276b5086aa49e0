from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.outputs import make_hostile_job


@dataclass(frozen=True)
class Job:
    """A finished job: its output, its shards, and the folder of both."""

    folder: Path
    out: Path
    shards: list[str]


@pytest.fixture(scope="session")
def hostile_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished job with hostile keys and captions; tests only read it."""
    folder = tmp_path_factory.mktemp("hostile")
    out, shards = make_hostile_job(folder)
    return Job(folder, out, shards)


@pytest.fixture
def own_job(tmp_path: Path) -> Job:
    """The same job, for tests that change it."""
    out, shards = make_hostile_job(tmp_path)
    return Job(tmp_path, out, shards)
