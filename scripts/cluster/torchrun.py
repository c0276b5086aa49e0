"""torchrun: two ranks on this machine, one of them killed, and rows held against one process's.

torchrun starts all ranks again when one dies, so a restart has to be cheap for the good ones; and
it returns 0 where ranks ended early or agents are gone. So its exit code is not believed:
`captionjob verify` has to say no while rows are missing, and yes at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.cluster.job import Job
from scripts.cluster.result import Result
from tests.commands import captionjob, environment

RANKS = 2
SECONDS = 180.0  # of one run, at most


def torchrun(workdir: Path) -> Result:
    """Run the job untroubled and then with a rank killed in the middle; compare all rows."""
    job = Job(workdir / "torchrun", num_shards=5, samples=24, latency=0.1)
    calm, code = _run(job, "calm", kill=False)
    seconds, killed_code = _run(job, "killed", kill=True)
    faults = job.faults("calm") + job.faults("killed")
    codes = (code, killed_code)
    if codes != (0, 0):
        faults.append(f"exit codes {codes}, wanted 0")
    early = _verify(job, "half")
    if early != 1:
        faults.append(f"verify of half the ranks ended with {early}, wanted 1")
    for out in ("calm", "killed"):
        if _verify(job, out) != 0:
            faults.append(f"verify finds {out} incomplete")
    starts = len(list((job.folder / "killed" / "_throughput").glob("*.jsonl")))
    return Result(
        name="torchrun: a rank killed",
        is_ok=not faults,
        rows=job.num_committed("killed"),
        retries=max(0, starts - RANKS),
        seconds=seconds,
        seconds_lost=max(0.0, seconds - calm),
        detail="; ".join(faults) or f"untroubled {calm:.1f} s; half the ranks alone: verify says 1",
    )


def _run(job: Job, out: str, *, kill: bool) -> tuple[float, int]:
    """Run all ranks; return the seconds, and torchrun's exit code."""
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--max-restarts", "3"),
            *("--nproc-per-node", str(RANKS), "-m", "jobs", *job.options(out)),
        ],
        cwd=job.folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=(job.folder / f"{out}.log").open("w"),
        start_new_session=True,
    )
    try:
        if kill:
            job.wait_for_rows(out, 0.3)
            os.kill(_ranks_of(process.pid)[0], signal.SIGKILL)
        code = process.wait(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - began, code


def _ranks_of(agent: int) -> list[int]:
    """Return the processes that an agent started as ranks of the job."""
    found = []
    for name in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        if b"jobs" in words and b"run" in words:
            found.append(int(name))
    return found


def _verify(job: Job, out: str) -> int:
    """Return what `captionjob verify` says; of `half`, after one rank of two ran alone."""
    if out == "half":
        told = {
            "TORCHELASTIC_RUN_ID": "half",
            "RANK": "0",
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        done = captionjob(*job.options("half", latency=0), cwd=job.folder, extra=told)
        if done.returncode:
            raise RuntimeError(f"one rank alone failed: {done.stderr}")
    words = ("verify", out, "--shards", "shards")
    return captionjob(*words, cwd=job.folder).returncode


if __name__ == "__main__":
    print(torchrun(Path(sys.argv[1])))
