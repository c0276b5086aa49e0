"""A worker that exits 75 in a job of Slurm is started again, by its admin's rule or by asking."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.fixtures import make_photo_shard
from tests.commands import REPOSITORY, captionjob, environment, start
from tests.jobs.launch.programs import calls, scontrol

RUN = ("run", "--shards", "a.tar", "--out", "out", "--slots", "2", "--time-limit", "2")
SLOW = (*RUN, "--model", "scripted:latency=0.2", "--grace-seconds", "1", "--max-requeues", "3")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    make_photo_shard(tmp_path / "a.tar", 60)
    return tmp_path


def test_where_no_admin_did_the_worker_asks_for_itself(here: Path) -> None:
    done = captionjob(*SLOW, cwd=here, extra=scontrol(here / "bin"))
    assert done.returncode == 75
    assert calls(here / "bin", "scontrol") == ["show config", "show job 7", "requeue 7"]
    assert "asking Slurm to start job 7 again" in done.stderr


@pytest.mark.parametrize("rule", ["75", "3,70-80"])
def test_where_the_admin_has_set_requeue_exit_nothing_is_asked(here: Path, rule: str) -> None:
    done = captionjob(*SLOW, cwd=here, extra=scontrol(here / "bin", requeue_exit=rule))
    assert done.returncode == 75
    assert calls(here / "bin", "scontrol") == ["show config"]


def test_a_cancelled_job_stays_cancelled(here: Path) -> None:
    extra = scontrol(here / "bin", state="CANCELLED", requeue_exit="7,76-80")
    done = captionjob(*SLOW, cwd=here, extra=extra)
    assert done.returncode == 75
    assert calls(here / "bin", "scontrol") == ["show config", "show job 7"]


def test_no_job_runs_in_circles(here: Path) -> None:
    extra = {**scontrol(here / "bin", requeue_exit="75"), "SLURM_RESTART_COUNT": "3"}
    done = captionjob(*SLOW, cwd=here, extra=extra)
    assert done.returncode == 1
    assert "started again 3 times by --max-requeues" in done.stderr
    assert not calls(here / "bin", "scontrol")


@pytest.mark.parametrize("words", [SLOW[:-2], (*SLOW, "--time-limit", "1m")])
def test_without_the_option_or_at_the_end_nothing_is_asked(
    here: Path, words: tuple[str, ...]
) -> None:
    make_photo_shard(here / "a.tar", 60 if words == SLOW[:-2] else 4)
    done = captionjob(*words, cwd=here, extra=scontrol(here / "bin"))
    assert done.returncode == (75 if words == SLOW[:-2] else 0)
    assert not calls(here / "bin", "scontrol")


def test_a_signal_while_it_asks_changes_nothing(here: Path) -> None:
    """Slurm sends USR1 first and TERM when the limit is reached, which may be then."""
    extra = scontrol(here / "bin")
    program = here / "bin" / "scontrol"
    program.write_text(program.read_text().replace("#!/bin/bash\n", "#!/bin/bash\nsleep 0.5\n"))
    process = start(SLOW, here, extra)
    end = time.monotonic() + 20
    while "show config" not in calls(here / "bin", "scontrol") and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert calls(here / "bin", "scontrol")[-1] == "requeue 7"


def test_a_signal_while_modules_are_imported_requeues_too(here: Path) -> None:
    code = (
        "import os, signal\n"
        "from functools import partial\n"
        "from jobs.requeue import requeued\n"
        "from jobs.stopping import nothing_done_yet\n"
        "end = partial(requeued, max_requeues=3, environment=os.environ)\n"
        "with nothing_done_yet(end): os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(scontrol(here / "bin")), cwd=REPOSITORY
    )
    assert done.returncode == 75
    assert calls(here / "bin", "scontrol")[-1] == "requeue 7"


def test_a_controller_that_does_not_answer_is_said_and_the_code_stays(here: Path) -> None:
    extra = scontrol(here / "bin")
    (here / "bin" / "scontrol").write_text("#!/bin/bash\necho 'no controller' >&2; exit 1\n")
    done = captionjob(*SLOW, cwd=here, extra=extra)
    assert done.returncode == 75
    assert "could not be asked to start job 7 again: no controller" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_after_the_end_does_not_make_a_failure_of_it(
    here: Path, number: signal.Signals
) -> None:
    """The time limit comes near while the interpreter of a job that is done is ending."""
    code = (
        "import atexit, sys, time\n"
        "from jobs.cli import main\n"
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(1)))\n"
        f"sys.argv = ['captionjob', *{(*RUN, '--model', 'scripted', '--time-limit', '1m')!r}]\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=here, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if line == "ending\n":
                process.send_signal(number)
        assert process.wait(20) == 0
