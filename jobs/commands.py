"""What each command does, behind the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jobs.alarms import alarms_of
from jobs.config import RunConfig
from jobs.display import display_on
from jobs.local_workers import LocalWorkers, own_words
from jobs.plan import Plan
from jobs.plan_text import plan_text
from jobs.result import RunResult, summary
from jobs.results import read_output
from jobs.run import Run
from jobs.status_view import alarm_lines
from jobs.stopping import EXIT_AGAIN, Stop
from jobs.terminal import bytes_text, plural, printable
from jobs.worker_pipe import pipe_of
from pipeline.checkpoints import FAMILIES
from pipeline.errors import StoreDownError
from pipeline.input.pack import PackSettings, pack_folder


def run_job(config: RunConfig) -> int:
    """Run the job with a display on stderr, print the summary, return the exit code."""
    stop = Stop(config.limits.grace_seconds)
    limit = config.limits.seconds
    pipe = pipe_of(os.environ, stop)
    display = pipe or display_on(sys.stderr)
    try:
        with stop.listening(None if limit is None else limit - config.limits.grace_seconds):
            result = Run(config, stop, display).run()
    except StoreDownError as error:
        if stop.seconds_left() is None:
            raise
        display.say(f"stopped by {stop.reason}: {error}")
        return EXIT_AGAIN
    finally:
        display.close()
    if pipe is not None:
        pipe.end(result)
    else:
        print("\n".join([*summary(result), *run_alarms(result)]), flush=True)
    return result.exit_code


def run_workers(config: RunConfig, number: int, words: Sequence[str]) -> int:
    """Run the job in so many processes on this machine; `words` are those of `captionjob run`."""
    stop = Stop(config.limits.grace_seconds)
    display = display_on(sys.stderr)
    command = [sys.executable, "-m", "jobs", "run", *own_words(words)]
    try:
        with stop.listening():
            workers = LocalWorkers(config, number, command, stop, display, os.environ)
            result, code = workers.run()
    finally:
        display.close()
    print("\n".join([*summary(result), *run_alarms(result)]), flush=True)
    return code


def run_alarms(result: RunResult) -> list[str]:
    """Look at all rows of this run's shards; not after a stop, whose time is short."""
    if result.stopped or not result.snapshot.images or result.is_claiming:
        return []
    ids = [state.shard.id for state in result.after.shards]
    return [printable(line) for line in alarm_lines(alarms_of(read_output(result.out), ids))]


def dry_run(config: RunConfig) -> int:
    """Print what a run would do; nothing is written."""
    for line in plan_text(Plan.make(config)):
        print(printable(line))
    return 0


def pack_pictures(folder: str, out: str, settings: PackSettings) -> None:
    """Pack a folder and say what was made."""
    packed = pack_folder(folder, out, settings)
    for shard in packed.shards:
        print(printable(shard))
    print(
        f"{plural(packed.num_images, 'image')} and {plural(packed.num_fields, 'field')} "
        f"({bytes_text(packed.num_bytes)}) in {plural(len(packed.shards), 'shard')}"
    )
    for reason, count in packed.findings.skipped.most_common():
        print(f"skipped: {count} {printable(reason)}")
    for path, reason in packed.findings.unreadable:
        print(f"unreadable: {printable(path)}: {printable(reason)}")
    if packed.stale:
        print(f"of an earlier pack, and not replaced: {printable(', '.join(packed.stale[:5]))}")


def list_models() -> None:
    """Print the families, what each needs, and the memory that its published networks take."""
    width = max(len(family.name) for family in FAMILIES)
    for family in FAMILIES:
        runs = "" if family.backend == family.name else f" ({family.backend})"
        print(f"{family.name.ljust(width)}  {family.summary}{runs}")
        print(f"{'':{width}}  --model {family.example}")
        print(f"{'':{width}}  needs {family.needs}")
        for example in family.examples:
            print(f"{'':{width}}    {example.hub_id}: {example.memory(2)} in bfloat16")
