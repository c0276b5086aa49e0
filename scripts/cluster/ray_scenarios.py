"""Ray: actors on three nodes, one of which is killed, and a driver that is told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.cluster.install import MissingError, need_venv
from scripts.cluster.job import Job
from scripts.cluster.result import Result
from tests.commands import REPOSITORY

REQUIREMENT = "ray[default]==2.60.0"
START_SECONDS = 120.0
SECONDS = 180.0
ACTORS = 4


def ray_python(tools: Path) -> Path:
    """Return the Python of an environment that has Ray, made in the tools' folder if need be."""
    return need_venv(tools / "ray-venv", REQUIREMENT, "ray")


@dataclass(slots=True)
class RayCluster:
    """The cluster's process, and the environment of its clients."""

    python: Path
    folder: Path
    address: str = ""
    dashboard: str = ""
    _started: list[subprocess.Popen[str]] = field(default_factory=list)
    _process: subprocess.Popen[str] = field(init=False)

    @property
    def environment(self) -> dict[str, str]:
        """What all of Ray's processes are told; the token is that of this cluster alone."""
        return {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or 127.0.0.1 becomes another address
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_TMPDIR": "/tmp",  # paths of its sockets have to be short
        }

    def __enter__(self) -> RayCluster:
        (self.folder / "token").write_text(os.urandom(32).hex())
        with (self.folder / "nodes.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(self.python), "-m", "scripts.cluster.ray_nodes"],
                cwd=REPOSITORY,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            _, self.address, self.dashboard = self._answer().split()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def tell(self, words: str) -> None:
        """Give the cluster a command, and wait until it is done."""
        assert self._process.stdin
        print(words, file=self._process.stdin, flush=True)
        self._answer()

    def stop(self) -> None:
        """End it, the jobs that run on it, and whatever of its session is left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def start(self, job: Job, out: str, *further: str) -> subprocess.Popen[str]:
        """Start `captionjob launch ray` on it."""
        return self._start(job, self._words(job, out, self.address, further))

    def submit(self, job: Job, out: str) -> subprocess.Popen[str]:
        """Start it as a job that the cluster itself runs, from a folder that it copies."""
        folder = job.folder / "submitted"
        folder.mkdir(exist_ok=True)
        submit = [str(self.python.with_name("ray")), "job", "submit", "--address", self.dashboard]
        words = self._words(job, out, "auto", ())
        return self._start(job, [*submit, "--working-dir", str(folder), "--", *words])

    def _words(self, job: Job, out: str, address: str, further: tuple[str, ...]) -> list[str]:
        options = ["launch", "ray", "--address", address, f"--actors={ACTORS}", "--cpus=1"]
        return [str(self.python), "-m", "jobs", *options, "--", *job.options(out)[1:], *further]

    def _start(self, job: Job, words: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            words,
            cwd=job.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def _answer(self) -> str:
        assert self._process.stdout
        for line in self._process.stdout:
            if re.match(r"address |done$", line):
                return line.strip()
        raise MissingError(f"Ray did not start: see {self.folder / 'nodes.log'}")


def untroubled(cluster: RayCluster, job: Job) -> Result:
    """Nobody disturbs it; other settings for that folder are refused by an actor, in a line."""
    began = time.monotonic()
    process = cluster.start(job, "untroubled")
    result = _finish("ray: three nodes", job, "untroubled", process, began, 0.0)
    other = cluster.start(job, "untroubled", "--prompt", "Another one.")
    _, errors = other.communicate(timeout=SECONDS)
    refusal = [line for line in errors.splitlines() if line.startswith("captionjob: error: ")]
    if other.returncode != 2 or len(refusal) != 1 or "Traceback" in errors:
        return replace(result, is_ok=False, detail=f"exit {other.returncode}: {errors[-1000:]}")
    return result


def submitted(cluster: RayCluster, job: Job, untroubled_seconds: float) -> Result:
    """`ray job submit` runs the same command on the cluster."""
    began = time.monotonic()
    process = cluster.submit(job, "submitted-out")
    return _finish("ray: ray job submit", job, "submitted-out", process, began, untroubled_seconds)


def node_killed(cluster: RayCluster, job: Job, untroubled_seconds: float) -> Result:
    """A node and its actors end in the middle; nobody takes its place."""
    began = time.monotonic()
    process = cluster.start(job, "node-killed")
    job.wait_for_rows("node-killed", 0.3, process)
    cluster.tell("kill 0")
    return _finish("ray: a node killed", job, "node-killed", process, began, untroubled_seconds)


def stopped(cluster: RayCluster, job: Job, untroubled_seconds: float) -> Result:
    """The driver gets TERM in the middle and exits 75; the same command goes on."""
    cluster.tell("add")
    began = time.monotonic()
    process = cluster.start(job, "stopped")
    job.wait_for_rows("stopped", 0.3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)
    num_rows = job.num_committed("stopped")
    result = _finish(
        "ray: driver stopped",
        job,
        "stopped",
        cluster.start(job, "stopped"),
        began,
        untroubled_seconds,
    )
    if process.returncode != 75:
        errors = errors[-500:]
        detail = f"exit {process.returncode} after TERM, wanted 75: {errors}"
        return replace(result, is_ok=False, detail=detail)
    return replace(result, retries=1, detail=f"exit 75 with {num_rows} rows; {result.detail}")


def _finish(
    name: str,
    job: Job,
    out: str,
    process: subprocess.Popen[str],
    began: float,
    untroubled_seconds: float,
) -> Result:
    printed, errors = process.communicate(timeout=SECONDS)
    seconds = time.monotonic() - began
    faults = job.faults(out)
    if process.returncode:
        faults.append(f"exit {process.returncode}: {errors[-1500:]}")
    summary = next((line for line in printed.splitlines() if "captioned in" in line), "")
    return Result(
        name=name,
        is_ok=not faults,
        rows=job.num_committed(out),
        retries=errors.count("is gone"),
        seconds=seconds,
        seconds_lost=max(0.0, seconds - untroubled_seconds) if untroubled_seconds else 0.0,
        detail="; ".join(faults) or summary,
    )


def ray(workdir: Path, python: Path, *, is_quick: bool = False) -> Iterator[Result]:
    """Run all of it on one cluster."""
    job = Job(workdir / "job")
    with RayCluster(python, workdir) as cluster:
        first = untroubled(cluster, job)
        yield first
        yield node_killed(cluster, job, first.seconds)
        if not is_quick:
            yield submitted(cluster, job, first.seconds)
            yield stopped(cluster, job, first.seconds)
