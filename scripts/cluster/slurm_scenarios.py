"""Slurm arrays that lose nodes, time and the queue's favour, and end with all rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.cluster.job import Job
from scripts.cluster.result import Result
from scripts.cluster.slurm import SlurmCluster
from tests.commands import captionjob

ARRAY = 8
NUM_RUNNING = 6  # of these at once: three nodes of two processors
SECONDS = 240.0  # that a scenario may take
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
HOG = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=3 --exclusive\nsleep 4\n"


@dataclass(slots=True)
class Submitted:
    """An array and the check behind it."""

    array: str
    check: str


@dataclass(slots=True)
class Bench:
    """One Slurm and one job, on which scenarios run one after another."""

    slurm: SlurmCluster
    job: Job
    untroubled_seconds: float = 0.0

    def submit(self, out: str, *options: str) -> Submitted:
        """Print the script by `captionjob launch slurm`, as people do, and run it."""
        launch = ["launch", "slurm", f"--array={ARRAY}", "--cpus=1", "--logs", f"logs-{out}"]
        words = [*launch, *options, "--", *self.job.options(out)[1:]]
        printed = captionjob(*words, cwd=self.job.folder)
        if printed.returncode:
            raise RuntimeError(printed.stderr)
        said = self.slurm.call("bash", "-s", text=printed.stdout, cwd=self.job.folder)
        array, check = re.findall(r"as job (\d+)", said)
        return Submitted(array, check)

    def wait(self, job: str) -> None:
        """Wait until every task has ended for good."""
        end = time.monotonic() + SECONDS
        while not all(task.state in FINISHED for task in self.slurm.tasks(job)):
            if time.monotonic() > end:
                raise TimeoutError(f"job {job}: {self.slurm.tasks(job)}")
            time.sleep(0.3)

    def finish(self, name: str, out: str, jobs: Submitted, began: float, detail: str) -> Result:
        """Wait for array and check, and compare the rows."""
        self.wait(jobs.array)
        seconds = time.monotonic() - began
        self.wait(jobs.check)
        tasks = self.slurm.tasks(jobs.array)
        faults = self.job.faults(out)
        faults += [f"task {task.id} {task.state}" for task in tasks if task.state != "COMPLETED"]
        faults += [
            f"verify {task.state}"
            for task in self.slurm.tasks(jobs.check)
            if task.state != "COMPLETED"
        ]
        lost = max(0.0, seconds - self.untroubled_seconds) if self.untroubled_seconds else 0.0
        return Result(
            name=name,
            is_ok=not faults,
            rows=self.job.num_committed(out),
            retries=sum(task.restarts for task in tasks),
            seconds=seconds,
            seconds_lost=lost,
            detail="; ".join(faults) or detail,
        )


def array_of_8(bench: Bench) -> Result:
    """Nobody disturbs it; the others' lost seconds are counted from this one."""
    began = time.monotonic()
    jobs = bench.submit("untroubled")
    result = bench.finish("slurm: array of 8", "untroubled", jobs, began, "verify held")
    bench.untroubled_seconds = result.seconds
    return result


def node_killed(bench: Bench) -> Result:
    """The daemon of a node and all that runs on it are killed in the middle; it comes back late."""
    began = time.monotonic()
    jobs = bench.submit("node-killed")
    bench.job.wait_for_rows("node-killed", 0.3)
    num_killed = len(bench.slurm.workers_on("node2"))
    bench.slurm.power_off("node2")
    bench.wait(jobs.array)
    bench.slurm.power_on("node2")
    detail = f"{num_killed} workers killed with their node"
    result = bench.finish("slurm: a node killed", "node-killed", jobs, began, detail)
    return result if num_killed and result.retries else _failed(result, "nothing was killed")


def preempted(bench: Bench) -> Result:
    """An urgent job takes all three nodes in the middle."""
    began = time.monotonic()
    jobs = bench.submit("preempted")
    bench.job.wait_for_rows("preempted", 0.3)
    bench.slurm.call("sbatch", text=HOG)
    detail = "an urgent job took all nodes for 4 s"
    result = bench.finish("slurm: preemption", "preempted", jobs, began, detail)
    return result if result.retries else _failed(result, "nobody was preempted")


def cancelled(bench: Bench) -> Result:
    """`scancel` in the middle; nothing runs again by itself; the same command goes on."""
    began = time.monotonic()
    jobs = bench.submit("cancelled")
    bench.job.wait_for_rows("cancelled", 0.3)
    bench.slurm.call("scancel", jobs.array)
    bench.wait(jobs.array)
    bench.wait(jobs.check)
    num_rows = bench.job.num_committed("cancelled")
    time.sleep(3.0)  # in which a task that asked to be requeued would have started
    revived = [task for task in bench.slurm.tasks(jobs.array) if task.state != "CANCELLED"]
    checked = bench.slurm.tasks(jobs.check)[0].state
    again = bench.submit("cancelled")
    detail = f"{num_rows} rows kept, verify after it {checked}, submitted again"
    result = bench.finish("slurm: scancel", "cancelled", again, began, detail)
    done_before = [task for task in revived if task.state == "COMPLETED"]
    if len(revived) > len(done_before) or checked != "FAILED":
        return _failed(result, f"after scancel: {revived}, verify {checked}")
    return result


def time_limit(bench: Bench) -> Result:
    """A limit of a minute, of which a worker has half: each is started again."""
    job = Job(bench.job.folder, bench.job.num_shards, bench.job.samples, latency=0.4)
    slow = Bench(bench.slurm, job)
    began = time.monotonic()
    jobs = slow.submit("time-limit", "--time=1:00", "--signal-seconds=35")
    result = slow.finish("slurm: time limit", "time-limit", jobs, began, "USR1 35 s before 1:00")
    lost = result.seconds - job.captioning_seconds("time-limit") / NUM_RUNNING
    result = replace(result, seconds_lost=max(0.0, lost))
    return result if result.retries else _failed(result, "no limit was reached")


def _failed(result: Result, why: str) -> Result:
    return replace(result, is_ok=False, detail=why)


QUICK: tuple[Callable[[Bench], Result], ...] = (array_of_8, node_killed)
ALL = (array_of_8, node_killed, preempted, cancelled, time_limit)
WITHOUT_REQUEUE_EXIT = (preempted, cancelled, time_limit)


def slurm(workdir: Path, *, is_quick: bool = False) -> Iterator[Result]:
    """Run all of it, also on a Slurm whose admin has not set RequeueExit."""
    job = Job(workdir / "slurm-job")
    with SlurmCluster(workdir) as cluster:
        bench = Bench(cluster, job)
        for scenario in QUICK if is_quick else ALL:
            yield scenario(bench)
    if is_quick:
        return
    job = Job(workdir / "slurm-job-plain")
    with SlurmCluster(workdir, has_requeue_exit=False) as cluster:
        bench = Bench(cluster, job, bench.untroubled_seconds)
        for scenario in WITHOUT_REQUEUE_EXIT:
            result = scenario(bench)
            yield replace(result, name=f"{result.name}, no RequeueExit")
