"""`captionjob run --workers N`: N processes on this machine, one job, one display, one summary.

parent ──┬── worker 0   its own GPU, or its share of the cores; takes shards by lease
         ├── worker 1   tells the parent how far it is, through a pipe
         └── ...        is started again a few times if it dies

The parent captions nothing. It passes signals on, and waits; workers whose parent is gone stop.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TextIO

from jobs.config import RunConfig
from jobs.display import Display, Standing
from jobs.plan import Plan
from jobs.ranks import JOB_ID, LOCAL_RANK, LOCAL_SIZE, RANK, WORLD_SIZE
from jobs.result import EXIT_FAILED, EXIT_REQUEST, RunResult, plan_line
from jobs.sharing import num_cores
from jobs.stopping import EXIT_AGAIN, Stop, StopClock
from jobs.worker_pipe import PIPE, Report, total
from pipeline.errors import RequestError
from pipeline.output import leases
from pipeline.output.job_record import claim_folder

MAX_RESTARTS = 3  # of each worker
LOOK_SECONDS = 0.2
CORES_A_WORKER = 4  # with `auto`: more threads than that a small network cannot use
_GPU_NAME = re.compile(r"\d+$|GPU-|MIG-")
ENDINGS = (0, EXIT_FAILED, EXIT_REQUEST, EXIT_AGAIN)  # exit codes that a worker means
# What the parent answers itself, and how many words each has behind it.
_OWN_OPTIONS = {
    "--workers": 1,
    "--rank": 1,
    "--world-size": 1,
    "--max-requeues": 1,
    "--overwrite": 0,
    "--claim": 0,
}


def num_workers(text: str, environ: Mapping[str, str], device: str = "auto") -> int:
    """Read `--workers`: a number, or `auto` for one a GPU, else one for each few cores.

    A `--device` that is one GPU by its number has one worker, and `cpu` those of the cores.
    """
    if text == "auto":
        if device.startswith("cuda:"):
            return 1
        found = 0 if device == "cpu" else num_gpus(environ)
        return found or max(1, num_cores() // CORES_A_WORKER)
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise RequestError(f"--workers is {text!r}; wanted 1 to 1024, or auto")
    return int(text)


def num_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that CUDA would show, without loading it."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops at the first name that is none, such as -1 or Slurm's NoDevFiles.
        names = (name.strip() for name in visible.split(","))
        return sum(1 for _ in takewhile(_GPU_NAME.match, names))
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words of a `captionjob run` without those that the parent answers itself."""
    kept: list[str] = []
    num_left = 0
    for word in words:
        name, has_value, _ = word.partition("=")
        if num_left:
            num_left -= 1
        elif name in _OWN_OPTIONS:
            num_left = 0 if has_value else _OWN_OPTIONS[name]
        else:
            kept.append(word)
    return kept


@dataclass(slots=True)
class Child:
    """One worker's process, started again if it dies."""

    words: list[str]
    environ: dict[str, str]
    report: Report = field(default_factory=Report)
    num_starts: int = 0
    process: subprocess.Popen[str] | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, stderr: TextIO) -> None:
        """Start the process; what it writes to stderr is passed on line by line."""
        self.num_starts += 1
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            self.words,
            env={**self.environ, PIPE: str(write_end)},
            pass_fds=(write_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C goes to the parent alone
        )
        os.close(write_end)
        self._threads = [
            threading.Thread(target=self._listen, args=(read_end,), daemon=True),
            threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def exit_code(self) -> int | None:
        """Return how the process ended, once all that it said was heard; None while it runs."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            for thread in self._threads:
                thread.join(timeout=5)
        return code

    def signal(self, number: int) -> None:
        """Pass a signal on, if there is anybody to get it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _listen(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                self.report.hear(line)

    def _pass_on(self, stderr: TextIO) -> None:
        for line in stderr:
            self.report.said.append(line.rstrip().removeprefix("captionjob: "))


@dataclass(slots=True)
class LocalWorkers:
    """The parent of all workers on this machine."""

    config: RunConfig
    number: int
    words: list[str]  # of a worker's command, without what tells its place
    stop: Stop
    display: Display
    environ: Mapping[str, str]
    children: list[Child] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)  # worker -> how it ended
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> tuple[RunResult, int]:
        """Check the request once, start the workers, and wait for them; RequestError as `Run`."""
        if self.config.limits.samples is not None:
            raise RequestError("--limit counts the samples of the whole job; wanted --workers 1")
        plan = Plan.make(self.config)
        self.display.say(f"{self.number} workers on this machine")
        self.display.say(plan_line(plan.before))
        if self.config.overwrite:
            claim_folder(plan.out, plan.record, overwrite=True)
            plan = Plan.make(replace(self.config, overwrite=False))
        num_bytes = sum(s.shard.size or 0 for s in plan.before.shards if not s.is_done)
        self.children = [self._child(number) for number in range(self.number)]
        if plan.before.num_done < len(plan.before.shards):
            self._wait(plan, num_bytes)
        return self._result(plan), self.exit_code

    @property
    def exit_code(self) -> int:
        """75 if any worker ended so, else 2, else 1; a death that was not made good is a 1."""
        codes = set(self.codes.values())
        for code in (EXIT_AGAIN, EXIT_REQUEST):
            if code in codes:
                return code
        return EXIT_FAILED if codes - {0} else 0

    def _child(self, number: int) -> Child:
        place = self.config.worker.place
        is_dealt = bool(self.config.retry) or (
            place.world_size > 1 and not self.config.worker.is_claiming
        )
        told = {
            RANK: str(place.rank * self.number + number),
            WORLD_SIZE: str(place.world_size * self.number),
            LOCAL_RANK: str(place.local_rank * self.number + number),
            LOCAL_SIZE: str(place.local_size * self.number),
            JOB_ID: place.job or f"local-{os.getpid()}-{time.time_ns()}",
        }
        words = self.words if is_dealt else [*self.words, "--claim"]
        return Child(words, {**self.environ, **told})

    def _wait(self, plan: Plan, num_bytes: int) -> None:
        """Start all, and look after them until the last one has ended."""
        for child in self.children:
            child.start(sys.stderr)
        clock = StopClock(self.stop)
        has_passed_on = False
        while len(self.codes) < len(self.children):
            if not clock.sleep(LOOK_SECONDS):
                time.sleep(LOOK_SECONDS)
            if self.stop.is_requested and not has_passed_on:
                has_passed_on = True
                self.display.say(f"stopping ({self.stop.reason}): workers commit what is finished")
                for child in self.children:
                    child.signal(15)
            for number, child in enumerate(self.children):
                if number not in self.codes:
                    self._look_after(number, child, plan)
                self._speak(number, child)
            self.display.show(self._standing(num_bytes))

    def _look_after(self, number: int, child: Child, plan: Plan) -> None:
        """Note how a worker ended; one that died is started again."""
        code = child.exit_code()
        if code is None:
            return
        if code in ENDINGS:
            self.codes[number] = code
            return
        for lease in leases.of_worker(plan.out, child.report.worker):
            leases.release(
                plan.out, lease, is_over=False
            )  # it is dead for sure, so nobody has to wait
        may_start = child.num_starts <= MAX_RESTARTS and not self.stop.is_requested
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        again = "starting it again" if may_start else "giving it up"
        self.display.say(f"worker {number} died ({how}): {again}")
        if may_start:
            child.report.restart()
            child.start(sys.stderr)
        else:
            self.codes[number] = EXIT_AGAIN if self.stop.is_requested else EXIT_FAILED

    def _speak(self, number: int, child: Child) -> None:
        while child.report.said:
            self.display.say(f"[{number}] {child.report.said.pop(0)}")

    def _standing(self, num_bytes: int) -> Standing:
        """Add up what the workers told."""
        seconds = time.perf_counter() - self.began
        found = [one.report.standing for one in self.children if one.report.standing]
        images = sum(one.num_images for one in found)
        seen, passed = sum(one.images_seen for one in found), sum(one.bytes_seen for one in found)
        num_total = max(images, round(seen * num_bytes / passed)) if passed and num_bytes else None
        snapshot = total([one.report.snapshot for one in self.children], seconds=seconds)
        images += sum(one.report.before.images for one in self.children)
        return Standing(images, num_total, snapshot)

    def _result(self, plan: Plan) -> RunResult:
        reports = [child.report for child in self.children]
        running = [one.snapshot for one in reports]
        seconds = max((one.seconds for one in running), default=0.0)
        failed: dict[str, str] = {}
        errors: Counter[str] = Counter()
        for report in reports:
            failed.update(report.failed)
            errors.update(report.errors)
        stopped = self.stop.reason or next((one.stopped for one in reports if one.stopped), "")
        snapshot = total(running, seconds=seconds)
        return RunResult(
            out=plan.out,
            before=plan.before,
            after=plan.state_now(),
            snapshot=replace(snapshot, resumed_rows=plan.before.num_rows),
            tuning=plan.tuning,
            errors=errors,
            failed=failed,
            stopped=stopped,
        )
