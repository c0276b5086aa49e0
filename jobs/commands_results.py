"""The commands that look at captions: status, report, verify, export, import, compare.

Thin skins, as in `jobs.cli`: parse, call one function, exit with its code. Nothing heavy is
imported before a command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

OUT = click.argument("out", metavar="OUT")
SHARDS_HELP = "The shards that OUT was made from: tars, folders, globs or braces; repeatable."


@click.command()
@OUT
@click.option(
    "--shards", multiple=True, metavar="PATTERN", help=f"For to do and time left. {SHARDS_HELP}"
)
@click.option("--watch", is_flag=True, help="Show it again and again until the job is over.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between looks of --watch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(out: str, shards: tuple[str, ...], watch: bool, interval: float, as_json: bool) -> None:
    """Show how far a job is: shards, rows, errors, workers, time left, alarms.

    Reads the folder alone, so it works while the job runs and on any machine that sees OUT.

    \b
    Examples:
      captionjob status captions --shards 'shards/*.tar' --watch
      captionjob status captions --json
    """
    from jobs.status_view import print_status

    print_status(
        Path(out), shards, sys.stdout, as_json=as_json, is_watching=watch, seconds=interval
    )


@click.command()
@OUT
@click.option("--shards", multiple=True, required=True, metavar="PATTERN", help=SHARDS_HELP)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Caption N random images again, each alone, and hold the captions together.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of --sample.")
@click.option(
    "--model",
    metavar="FOLDER",
    help="For --sample, where the network lies now.  [default: as OUT names it]",
)
@click.option("--device", default="auto", show_default=True, help="For --sample.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    out: str,
    shards: tuple[str, ...],
    sample: int | None,
    seed: int,
    model: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Prove that every image has exactly one row and every row its image.

    Reads all shards again: rows and images are joined by index, key, member and image hash.

    \b
    Examples:
      captionjob verify captions --shards 'shards/*.tar'
      captionjob verify captions --shards 'shards/*.tar' --sample 50
    Exit code 1 if anything does not hold.
    """
    from jobs.verify_view import SampleRequest, print_verification

    wanted = None if sample is None else SampleRequest(sample, seed, model, device)
    sys.exit(print_verification(Path(out), shards, wanted, sys.stdout, as_json=as_json))


RESULT_COMMANDS = (status, verify)
