"""Programs of a cluster, in a few lines of shell each, that write down what they were asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def fake(folder: Path, name: str, body: str) -> dict[str, str]:
    """Put a program first on the path; return the environment in which it is found."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/bash\necho "$@" >> {folder}/{name}.calls\n{body}\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def calls(folder: Path, name: str) -> list[str]:
    """Return the words of each call so far."""
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def scontrol(
    folder: Path, *, requeue_exit: str = "(null)", state: str = "RUNNING"
) -> Mapping[str, str]:
    """Return the environment of a job under a Slurm of this configuration."""
    body = f"""case "$1 $2" in
    "show config") echo "RequeueExit             = {requeue_exit}" ;;
    "show job") echo "JobId=7 JobState={state} Reason=None" ;;
    esac"""
    return {**fake(folder, "scontrol", body), "SLURM_JOB_ID": "7"}
