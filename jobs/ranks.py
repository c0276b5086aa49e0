"""Which worker this process is: told by options, or by the engine that started it.

    --rank, CAPTIONJOB_RANK > torchrun > Slurm array > Slurm step > Kubernetes index
                            > AWS Batch > SkyPilot > alone

A variable counts only if the engine that sets it is surely there. Bare RANK and WORLD_SIZE are
never believed: they leak from shells and images, and then every worker would leave out shards.
Of an allocation (`sbatch`, `salloc`) SLURM_PROCID says 0 to everybody, so it counts in a step
alone. Where a share could be missed, the request is refused and says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipeline.errors import RequestError

RANK, WORLD_SIZE = "CAPTIONJOB_RANK", "CAPTIONJOB_WORLD_SIZE"
LOCAL_RANK, LOCAL_SIZE = "CAPTIONJOB_LOCAL_RANK", "CAPTIONJOB_LOCAL_SIZE"
JOB_ID = "CAPTIONJOB_JOB_ID"


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among all, and among those on its machine."""

    rank: int = 0
    world_size: int = 1
    source: str = "alone"  # who said so
    local_rank: int = 0
    local_size: int = 1  # workers on this machine that share its cores and devices
    job: str = ""  # what all workers of one start have in common, if the engine tells

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise RequestError(
                f"worker {self.rank} of {self.world_size} ({self.source}): "
                "wanted a rank from 0 to the world size less 1"
            )

    def __str__(self) -> str:
        here = f", {self.local_rank} of {self.local_size} here" if self.local_size > 1 else ""
        return f"worker {self.rank} of {self.world_size}{here} ({self.source})"


def find_place(
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str],
    *,
    is_claiming: bool = False,
) -> Place:
    """Find this worker's place; RequestError where it is told by halves.

    With `is_claiming` shards are taken by lease, so that a wrong place costs nothing: it only
    says where in the list to begin.
    """
    if (rank is None) != (world_size is None):
        found, missing = ("--rank", "--world-size")[:: 1 if world_size is None else -1]
        raise RequestError(f"{found} is given without {missing}; wanted both, or neither")
    env = _Environment(environ, is_claiming)
    if rank is not None and world_size is not None:
        place = Place(rank, world_size, "options")
    else:
        engines: tuple[Callable[[_Environment], Place | None], ...] = (
            *(_own, _torchrun, _slurm, _kubernetes, _aws_array, _aws_nodes),
            *(_skypilot,),
        )
        place = next(filter(None, (engine(env) for engine in engines)), Place())
    if LOCAL_SIZE in env:
        place = replace(place, local_rank=env.number(LOCAL_RANK), local_size=env.number(LOCAL_SIZE))
    return replace(place, job=env.text(JOB_ID) or place.job)


class _Environment:
    """The environment, read with an eye on what makes no sense."""

    def __init__(self, environ: Mapping[str, str], is_claiming: bool) -> None:
        self._environ = environ
        self.is_claiming = is_claiming

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def text(self, name: str) -> str:
        return self._environ.get(name, "")

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if not text and default is not None:
            return default
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise RequestError(f"{name} is {text!r}; wanted a whole number")
        return int(text)


def _own(env: _Environment) -> Place | None:
    if RANK not in env:
        return None
    if WORLD_SIZE not in env:
        raise RequestError(f"{RANK} is set and {WORLD_SIZE} is not; wanted both, or neither")
    return Place(env.number(RANK), env.number(WORLD_SIZE), RANK)


def _torchrun(env: _Environment) -> Place | None:
    run = env.text("TORCHELASTIC_RUN_ID")
    if not run:
        return None
    if env.number("SLURM_ARRAY_TASK_COUNT", 1) > 1 and not env.is_claiming:
        raise RequestError(
            "torchrun inside a Slurm array: whether its ranks span the array cannot be told; "
            "give --rank and --world-size, or --claim"
        )
    return Place(
        env.number("RANK"),
        env.number("WORLD_SIZE"),
        "torchrun",
        env.number("LOCAL_RANK", 0),
        env.number("LOCAL_WORLD_SIZE", 1),
        job="" if run == "none" else run,  # "none" is what torchrun says where nobody named it
    )


def _slurm(env: _Environment) -> Place | None:
    """Return the place in an array, in a step, or in an array of steps."""
    has_array = "SLURM_ARRAY_TASK_ID" in env
    has_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    if not has_array and not has_step:
        return None
    array, num_arrays = _slurm_array(env) if has_array else (0, 1)
    task, num_tasks, local, num_local = 0, 1, 0, 1
    if has_step:
        task = env.number("SLURM_PROCID")
        num_tasks = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
        local = env.number("SLURM_LOCALID", 0)
        num_local = _tasks_of_node(env)
    names = ["array"] * has_array + ["step"] * has_step
    return Place(
        array * num_tasks + task,
        num_arrays * num_tasks,
        f"Slurm {' of '.join(reversed(names))}",
        local,
        num_local,
        job=env.text("SLURM_ARRAY_JOB_ID") or env.text("SLURM_JOB_ID"),
    )


def _slurm_array(env: _Environment) -> tuple[int, int]:
    """Return a task's place in its array, and how many there are."""
    task = env.number("SLURM_ARRAY_TASK_ID")
    first, last = env.number("SLURM_ARRAY_TASK_MIN"), env.number("SLURM_ARRAY_TASK_MAX")
    step = max(1, env.number("SLURM_ARRAY_TASK_STEP", 1))
    count = env.number("SLURM_ARRAY_TASK_COUNT")
    size = (last - first) // step + 1
    if size != count and not env.is_claiming:
        raise RequestError(
            f"the Slurm array has holes: {count} tasks from {first} to {last} by {step}, so that "
            f"{size - count} shares would be nobody's. To run some tasks again give --rank and "
            "--world-size as in the whole array, or --claim"
        )
    return (task - first) // step, size


def _tasks_of_node(env: _Environment) -> int:
    """Read this node's part of a list such as `4(x2),3`."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.text("SLURM_STEP_TASKS_PER_NODE")):
        counts += [int(number)] * min(int(times or 1), 100_000)
    node = env.number("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 1


def _kubernetes(env: _Environment) -> Place | None:
    if "JOB_COMPLETION_INDEX" not in env:
        return None
    if WORLD_SIZE not in env and not env.is_claiming:
        raise RequestError(
            "a Kubernetes Indexed Job (JOB_COMPLETION_INDEX) does not tell its size: set the "
            f"variable {WORLD_SIZE} to the job's .spec.completions, or give --claim"
        )
    if WORLD_SIZE not in env:
        return Place(source="Kubernetes index")
    return Place(env.number("JOB_COMPLETION_INDEX"), env.number(WORLD_SIZE), "Kubernetes index")


def _aws_array(env: _Environment) -> Place | None:
    if "AWS_BATCH_JOB_ARRAY_INDEX" not in env:
        return None
    index, size = env.number("AWS_BATCH_JOB_ARRAY_INDEX"), env.number("AWS_BATCH_JOB_ARRAY_SIZE")
    job = env.text("AWS_BATCH_JOB_ID").partition(":")[0]
    return Place(index, size, "AWS Batch array", job=job)


def _aws_nodes(env: _Environment) -> Place | None:
    if "AWS_BATCH_JOB_NODE_INDEX" not in env:
        return None
    index, size = env.number("AWS_BATCH_JOB_NODE_INDEX"), env.number("AWS_BATCH_JOB_NUM_NODES")
    job = env.text("AWS_BATCH_JOB_ID").partition("#")[0]
    return Place(index, size, "AWS Batch nodes", job=job)


def _skypilot(env: _Environment) -> Place | None:
    """Return the place among the nodes of a task, times the jobs of a pool."""
    has_pool, has_nodes = "SKYPILOT_JOB_RANK" in env, "SKYPILOT_NODE_RANK" in env
    if not has_pool and not has_nodes:
        return None
    node, num_nodes, job, num_jobs = 0, 1, 0, 1
    if has_nodes:
        listed = len(env.text("SKYPILOT_NODE_IPS").split())
        node = env.number("SKYPILOT_NODE_RANK")
        num_nodes = env.number("SKYPILOT_NUM_NODES", listed or None)
    if has_pool:
        job, num_jobs = env.number("SKYPILOT_JOB_RANK"), env.number("SKYPILOT_NUM_JOBS")
    return Place(job * num_nodes + node, num_jobs * num_nodes, "SkyPilot")
