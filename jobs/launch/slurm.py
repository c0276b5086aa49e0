"""A Slurm array of workers, and a `verify` behind it, as one script for people to read and run.

    bash SCRIPT ──► sbatch: array of N tasks ── each: exec captionjob run …, its rank from Slurm
                │                    exit 75 ──► requeued ──► goes on where it was
                └─► sbatch: verify, after the array, whatever became of it

The worker takes the place of the batch script (exec), so that Slurm's signals reach it and it
leaves no orphan. USR1 comes before the time limit, TERM at preemption: both make it commit and
exit with 75.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jobs.launch.run_words import RunWords, command_words, shell_line
from jobs.options import seconds_of
from pipeline.errors import RequestError

MARGIN_SECONDS = 10  # between the end of a worker's grace and the limit
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:=+-]*")
_MEMORY = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """What is asked of Slurm."""

    array: int
    time: str | None = None
    gpus: int = 0
    cpus: int = 2
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str = "captionjob"
    logs: Path = Path("logs")
    max_running: int | None = None
    signal_seconds: int = 120
    max_requeues: int = 100
    sbatch: tuple[str, ...] = ()  # further options of sbatch
    setup: tuple[str, ...] = ()  # lines of shell before the worker starts

    def __post_init__(self) -> None:
        for option, value in (
            ("--partition", self.partition),
            ("--account", self.account),
            ("--name", self.name),
        ):
            if value is not None and not _WORD.fullmatch(value):
                raise RequestError(f"{option} is {value!r}; wanted letters, digits and _.,:=+-")
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            raise RequestError(f"--mem is {self.mem!r}; wanted a size such as 16G")
        for option in self.sbatch:
            if not option.startswith("-") or not option.isprintable():
                raise RequestError(f"--sbatch is {option!r}; wanted an option, such as --qos=low")
        if self.time is not None and self.seconds <= self.signal_seconds:
            raise RequestError(
                f"--time is {self.time}; wanted more than --signal-seconds ({self.signal_seconds})"
            )
        if any(char in str(self.logs) for char in '%"\n\\'):
            raise RequestError(f'--logs is {str(self.logs)!r}; wanted a path without % " \\')

    @property
    def seconds(self) -> float:
        """The time limit of a task."""
        assert self.time is not None
        return seconds_of(self.time, "--time")


def slurm_script(settings: SlurmSettings, run: RunWords) -> str:
    """Return the script that submits the array and the check behind it.

    Raises RequestError where the workers' grace does not fit in the time that Slurm gives.
    """
    grace = run.config.limits.grace_seconds
    if settings.signal_seconds < grace + MARGIN_SECONDS:
        raise RequestError(
            f"--signal-seconds is {settings.signal_seconds}; wanted at least the run's "
            f"--grace-seconds ({grace:g}) and {MARGIN_SECONDS} more"
        )
    captionjob = command_words()
    worker = [*captionjob, "run", *run.words, "--max-requeues", str(settings.max_requeues)]
    check = [*captionjob, "verify", *run.verify_words]
    submit = "sbatch --parsable"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {settings.array} workers of one captionjob, and a check behind them: bash FILE",
            "set -eu",
            f"mkdir -p {shell_line([str(settings.logs.absolute())])}",
            "",
            *_function("worker", _worker_lines(settings), settings, worker),
            "",
            *_function("check", _check_lines(settings), settings, check),
            "",
            f"job=$(worker | {submit})",
            'job="${job%%;*}"  # a federation adds the name of its cluster',
            f"check=$(check | {submit} --dependency=afterany:$job)",
            f'echo "submitted {settings.array} workers as job $job, logs in {settings.logs}; '
            'a check follows as job ${check%%;*}"',
            "",
        ]
    )


def submit_script(script: str) -> None:
    """Run the script; RequestError with the words of sbatch where it refuses."""
    try:
        done = subprocess.run(["bash", "-s"], input=script, text=True, capture_output=True)
    except FileNotFoundError:
        raise RequestError("--submit: there is no bash here") from None
    if done.returncode:
        raise RequestError(f"sbatch refused the job: {done.stderr.strip()}")
    print(done.stdout, end="")


def _function(
    name: str, lines: list[str], settings: SlurmSettings, command: list[str]
) -> list[str]:
    """Return a shell function that prints a batch script."""
    end = f"END_OF_{name.upper()}"
    body = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in lines),
        f"cd {shell_line([str(Path.cwd())])}",
        *settings.setup,
        f"exec {shell_line(command)}",
    ]
    assert end not in body
    return [f"{name}() {{ cat <<'{end}'", *body, end, "}"]


def _worker_lines(settings: SlurmSettings) -> list[str]:
    together = f"%{settings.max_running}" if settings.max_running is not None else ""
    lines = [
        f"--job-name={settings.name}",
        f"--array=0-{settings.array - 1}{together}",
        *_shared_lines(settings),
        *([f"--gpus={settings.gpus}"] if settings.gpus else []),
        "--requeue",
        f"--signal=B:USR1@{settings.signal_seconds}",
        "--open-mode=append",
        f'--output="{settings.logs.absolute()}/%x-%A_%a.log"',
    ]
    return [*lines, *settings.sbatch]


def _check_lines(settings: SlurmSettings) -> list[str]:
    return [
        f"--job-name={settings.name}-verify",
        *_shared_lines(settings),
        f'--output="{settings.logs.absolute()}/%x-%j.log"',
    ]


def _shared_lines(settings: SlurmSettings) -> list[str]:
    lines = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={settings.cpus}"]
    for option in ("partition", "account", "mem"):
        value = getattr(settings, option)
        if value is not None:
            lines.append(f"--{option}={value}")
    if settings.time is not None:
        lines.append(f"--time={_clock(settings.seconds)}")
    return lines


def _clock(seconds: float) -> str:
    """Return a time as Slurm writes it: days-hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
