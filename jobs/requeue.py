"""Ask Slurm to start this task again, where its admin has not told it to do so on exit 75.

`RequeueExit=75` in slurm.conf requeues a task that exits with 75; most clusters do not have it.
There the worker asks for itself, as the last thing it does: everything is committed by then, so
that it does not matter when Slurm kills it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping

from jobs.stopping import EXIT_AGAIN, SIGNALS

SECONDS = 60.0  # that a busy controller may take
EXIT_GIVEN_UP = 1
# Only of these is a task to run again; one that was cancelled must stay so.
ALIVE = ("RUNNING", "TIMEOUT", "COMPLETING")


def requeued(code: int, max_requeues: int | None, environment: Mapping[str, str]) -> int:
    """Return the exit code; if it is 75 in a job of Slurm, that will run again.

    After `max_requeues` starts the code is 1, so that no job runs in circles.
    """
    job = environment.get("SLURM_JOB_ID")
    if code != EXIT_AGAIN or max_requeues is None or job is None:
        return code
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # what they ask for is being done
    if int(environment.get("SLURM_RESTART_COUNT", "0")) >= max_requeues:
        _say(f"started again {max_requeues} times by --max-requeues; not once more")
        return EXIT_GIVEN_UP
    try:
        if not _is_admins(_ask("show", "config")) and _state(_ask("show", "job", job)) in ALIVE:
            _say(f"asking Slurm to start job {job} again")
            _ask("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _say(f"Slurm could not be asked to start job {job} again: {said.strip()}")
    return code


def _ask(*words: str) -> str:
    return subprocess.run(
        ["scontrol", *words], check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout


def _is_admins(config: str) -> bool:
    """True if Slurm requeues on exit 75 of its own."""
    found = re.search(r"^RequeueExit\s*=\s*(.*)$", config, re.MULTILINE)
    for part in (found[1] if found else "").split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if span and int(span[1]) <= EXIT_AGAIN <= int(span[2] or span[1]):
            return True
    return False


def _state(job: str) -> str:
    found = re.search(r"JobState=(\w+)", job)
    return found[1] if found else ""


def _say(text: str) -> None:
    print(f"captionjob: {text}", file=sys.stderr, flush=True)
