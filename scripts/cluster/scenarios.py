"""All scenarios by name: what each installs, and the function that runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.cluster.install import MissingError, need_programs
from scripts.cluster.nginx import install_nginx
from scripts.cluster.ray_scenarios import ray, ray_python
from scripts.cluster.remote_in import http_runs, s3_runs
from scripts.cluster.result import Result
from scripts.cluster.s3_out import s3_out
from scripts.cluster.seaweed import PACKAGE as SEAWEED_PACKAGE
from scripts.cluster.seaweed import install_seaweed
from scripts.cluster.slurm import PACKAGES as SLURM_PACKAGES
from scripts.cluster.slurm import PROGRAMS as SLURM_PROGRAMS
from scripts.cluster.slurm_scenarios import slurm
from scripts.cluster.torchrun import torchrun


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing to start, and what is done to it."""

    summary: str
    install: Callable[[Path], object]  # into a folder of tools; MissingError if it cannot
    run: Callable[[Path, Path, bool], Iterator[Result]]  # its folder, the tools, is it quick


def _slurm(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    return slurm(folder, is_quick=is_quick)


def _torchrun(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    yield torchrun(folder)


def _ray(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    return ray(folder, ray_python(tools), is_quick=is_quick)


def _s3_out(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    yield s3_out(folder, install_seaweed(tools))


def _s3_in(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    return s3_runs(folder, install_seaweed(tools))


def _http_in(folder: Path, tools: Path, is_quick: bool) -> Iterator[Result]:
    return http_runs(folder)


def _need_seaweed(tools: Path) -> None:
    try:
        install_seaweed(tools)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError(f"{SEAWEED_PACKAGE}: {error}") from None


SCENARIOS = {
    "slurm": Scenario(
        "an array of 8 on three nodes: one killed, preemption, a time limit, scancel",
        lambda tools: need_programs(SLURM_PROGRAMS, SLURM_PACKAGES),
        _slurm,
    ),
    "torchrun": Scenario(
        "two ranks on this machine: one killed; half of them alone",
        lambda tools: None,  # torch is here
        _torchrun,
    ),
    "ray": Scenario("four actors on three nodes: one killed, the driver stopped", ray_python, _ray),
    "s3-out": Scenario(
        "from S3 to S3 while connections break, workers and the server are killed, and one looks",
        _need_seaweed,
        _s3_out,
    ),
    "s3-in": Scenario(
        "shards from S3: connections cut, reset and stalled, the server killed, a wrong secret",
        _need_seaweed,
        _s3_in,
    ),
    "http-in": Scenario(
        "shards from nginx: the same breaks, and a slow server without and with --spool",
        lambda tools: install_nginx(),
        _http_in,
    ),
}
