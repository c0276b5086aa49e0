"""`captionjob bench`: a thin skin, as in `jobs.cli`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from jobs.run_options import (
    CAPTION_OPTIONS,
    END_OPTIONS,
    INPUT_OPTIONS,
    MODEL_OPTIONS,
    SPEED_OPTIONS,
    SPOOL_OPTIONS,
    WORKER_OPTIONS,
)
from jobs.stopping import nothing_done_yet

# Options of speed are chosen anew, so the command to copy does not repeat them.
CHOSEN = ("slots", "prefill_batch", "threads", "loader_workers")
OWN = ("seconds",)


@click.command()
@INPUT_OPTIONS
@MODEL_OPTIONS
@CAPTION_OPTIONS
@SPEED_OPTIONS
@click.option(
    "--seconds",
    type=float,
    default=60.0,
    show_default=True,
    help="How long to measure; a slow network needs more.",
)
def bench(seconds: float, **options: Any) -> None:
    """Measure for a minute, on this machine and these shards, where a job's time would go.

    Runs the loader alone, the network alone, the whole job, and then the job with other settings
    of speed, one change at a time. Prints a table, what bounds the job, a command with the
    fastest settings that were measured, and last one line of JSON. Nothing is written but to a
    temporary folder. Ctrl-C ends it with what was measured so far, and exit code 75.

    \b
    Example:
      captionjob bench --model default --shards 'shards/*.tar'
    """
    with nothing_done_yet():
        from jobs.bench.view import print_bench
        from jobs.options import run_config

        words = given_words(click.get_current_context(), options)
        config = run_config({**run_defaults(), "out": ".", **options})
    sys.exit(print_bench(config, seconds, words))


def run_defaults() -> dict[str, Any]:
    """Return the options of `run` that `bench` does not have, as they are if nobody gives them."""

    @click.command()
    @SPOOL_OPTIONS
    @WORKER_OPTIONS
    @END_OPTIONS
    def rest(**_: Any) -> None:
        """Stand for the rest of `run`."""

    return dict(rest.make_context("bench", []).params)


def given_words(context: click.Context, options: Mapping[str, Any]) -> list[str]:
    """Return the options that were given on the command line, for a command to copy."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        is_given = source is click.core.ParameterSource.COMMANDLINE
        if not is_given or name in (*CHOSEN, *OWN) or not isinstance(parameter, click.Option):
            continue
        value = options[name]
        if parameter.is_flag:
            words.append(parameter.opts[0])
            continue
        for one in value if parameter.multiple else [value]:
            words += [parameter.opts[0], str(one)]
    return words
