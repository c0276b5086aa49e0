"""Running the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which `python -m jobs` is this working tree's command."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", **(extra or {})}


def start(
    arguments: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `captionjob` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", *arguments],
        cwd=cwd,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def captionjob(
    *arguments: str, cwd: Path, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `captionjob` to its end."""
    process = start(arguments, cwd, extra)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
