"""`scripts/cluster-test` says what held, what did not, and what could not be installed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.cluster import main as cluster
from scripts.cluster.install import MissingError, need_programs
from scripts.cluster.job import Job
from scripts.cluster.result import Result
from scripts.cluster.scenarios import SCENARIOS, Scenario
from tests.commands import captionjob


def held(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    assert folder.is_dir()
    yield Result("a node killed", True, 670, 2, 47.2, 25.6, "quick" if is_quick else "all")


def broken(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    yield Result("a rank killed", True, 10, 1, 2.0, 1.0)
    raise RuntimeError("it fell over")


def absent(tools: Path) -> None:
    raise MissingError("slurmctld: no network")


def interrupted(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    raise KeyboardInterrupt
    yield


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "held": Scenario("", lambda tools: None, held),
        "broken": Scenario("", lambda tools: None, broken),
        "absent": Scenario("", absent, held),
        "interrupted": Scenario("", lambda tools: None, interrupted),
    }
    monkeypatch.setattr(cluster, "SCENARIOS", found)


@pytest.mark.usefixtures("scenarios")
@pytest.mark.parametrize(
    ("names", "code"),
    [(["held"], 0), (["held", "absent"], 3), (["absent", "broken"], 1), (["interrupted"], 130)],
)
def test_the_exit_code_tells_held_from_broken_and_missing(
    names: list[str], code: int, tmp_path: Path
) -> None:
    assert cluster.main(["--only", *names, "--work", str(tmp_path)]) == code


@pytest.mark.usefixtures("scenarios")
def test_the_last_line_is_json_below_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--only", "held", "broken", "absent", "--work", str(tmp_path)]
    assert cluster.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["scenario", "rows", "retries", "seconds", "lost", "ok"]
    assert lines[1].split() == ["a", "node", "killed", "670", "2", "47", "26", "yes"]
    assert lines[-2] == "not run: absent: slurmctld: no network"
    found = json.loads(lines[-1])
    assert found["ok"] is False
    assert [one["name"] for one in found["results"]] == ["a node killed", "a rank killed", "broken"]
    assert found["results"][0]["detail"] == "quick"
    assert found["results"][2]["detail"] == "RuntimeError: it fell over"


def test_a_program_that_no_package_brings_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need_programs(["sh"], ["no-such-package"])  # it is there: nothing is installed
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(MissingError, match="no-such-program: wanted no-such-package, and root"):
        need_programs(["no-such-program"], ["no-such-package"])


def test_rows_that_are_lost_or_other_ones_are_found(tmp_path: Path) -> None:
    job = Job(tmp_path, num_shards=3, samples=4)
    assert job.num_rows == 15
    done = captionjob(*job.options("out", latency=0), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert job.faults("out") == []
    assert job.num_committed("out") == 15
    first, second, _ = sorted((tmp_path / "out").glob("*.parquet"))
    second.unlink()
    assert job.faults("out")[0].startswith("5 rows lost")
    (tmp_path / "out" / "copy.parquet").write_bytes(first.read_bytes())
    assert job.faults("out")[1].startswith("4 rows twice")


def test_each_scenario_says_what_it_is() -> None:
    assert all(len(scenario.summary) > 20 for scenario in SCENARIOS.values())
