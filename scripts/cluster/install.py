"""Getting what a scenario needs: Debian's packages, or a virtual environment in the work folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SECONDS = 600.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class MissingError(Exception):
    """Something is not installed and cannot be installed here."""


def need_programs(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install packages with apt-get unless all programs are there; MissingError if that fails."""
    absent = [name for name in programs if shutil.which(name, path=PATH) is None]
    if not absent:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise MissingError(f"{', '.join(absent)}: wanted {' '.join(packages)}, and root to install")
    _run(["apt-get", "update", "-qq"])
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])
    absent = [name for name in programs if shutil.which(name, path=PATH) is None]
    if absent:
        raise MissingError(f"{', '.join(absent)} did not come with {' '.join(packages)}")


def need_venv(folder: Path, requirement: str, module: str) -> Path:
    """Return the Python of an environment that has a package beside all of our own.

    The packages of the environment we run in are seen from it, so that nothing large is
    installed twice.
    """
    python = folder / "bin" / "python"
    if not _can_import(python, module):
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        site = subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        ours = "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
        (Path(site.strip()) / "ours.pth").write_text(ours + "\n")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*pip, requirement])
    if not _can_import(python, module):
        raise MissingError(f"{requirement} was installed, and {module} cannot be imported")
    return python


def _can_import(python: Path, module: str) -> bool:
    if not python.exists():
        return False
    return not subprocess.run(
        [str(python), "-c", f"import {module}"], capture_output=True
    ).returncode


def _run(words: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise MissingError(f"{' '.join(words)}: {said[-1] if said else done.returncode}")
