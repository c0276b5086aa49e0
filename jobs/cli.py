"""The command line: parse, call one function, translate errors to one line and an exit code.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import click

from jobs.commands_results import RESULT_COMMANDS
from jobs.terminal import printable
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.errors import CaptionJobError, RequestError

Command = TypeVar("Command", bound=Callable[..., Any])
SAMPLING = SamplingSettings()
SPEED = SpeedSettings()

EXIT_CODES = """\b
Exit codes:
  0   all done (rows of bad images are in the summary)
  1   done, but shards failed or too many rows did; a rerun is safe
  2   the request is wrong; nothing was captioned
  75  stopped by a signal or a time limit, all finished rows committed: start again
"""


def _version() -> str:
    try:
        return version("captionjob")
    except PackageNotFoundError:
        return "not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(_version(), prog_name="captionjob")
def cli() -> None:
    """Caption the images of WebDataset tars: one Parquet file a shard, one row an image.

    \b
    Example:
      captionjob run --shards 'shards/{00000..00099}.tar' --out captions
    """


def _default_loader_workers() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(2, min(8, cores))


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


SHARDS = click.option(
    "--shards",
    multiple=True,
    required=True,
    metavar="PATTERN",
    help="A tar, a folder of tars, a glob or braces such as 'data/{00000..00099}.tar'; repeatable.",
)
MODEL_OPTIONS = _options(
    click.option(
        "--model",
        default="default",
        show_default=True,
        metavar="default|FOLDER|HUB_ID[@REV]",
        help="The network: the built-in one, a checkpoint's folder, or a hub id.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "native", "transformers"]),
        default="auto",
        show_default=True,
        help="Who runs the network: our own engine, or the transformers library.",
    ),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:N or mps."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="How wide the network's numbers are.",
    ),
)
CAPTION_OPTIONS = _options(
    click.option(
        "--prompt", help="A template such as 'Describe {json.title}.'  [default: the model's own]"
    ),
    click.option("--max-new-tokens", type=int, default=SAMPLING.max_new_tokens, show_default=True),
    click.option("--min-new-tokens", type=int, default=SAMPLING.min_new_tokens, show_default=True),
    click.option(
        "--temperature",
        type=float,
        default=SAMPLING.temperature,
        show_default=True,
        help="0 takes the likeliest token each time.",
    ),
    click.option("--top-p", type=float, default=SAMPLING.top_p, show_default=True),
    click.option("--top-k", type=int, default=SAMPLING.top_k, show_default=True, help="0: off."),
    click.option(
        "--repetition-penalty", type=float, default=SAMPLING.repetition_penalty, show_default=True
    ),
    click.option("--seed", type=int, default=SAMPLING.seed, show_default=True),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End a caption before TEXT; repeatable."
    ),
    click.option(
        "--num-captions",
        type=int,
        default=SAMPLING.num_captions,
        show_default=True,
        help="Captions of each image, a row each.",
    ),
    click.option(
        "--keep",
        multiple=True,
        metavar="FIELD",
        help="A column from each sample's own fields, such as json.title or txt; repeatable.",
    ),
    click.option("--max-pixels", type=int, default=178_956_970, show_default=True),
    click.option(
        "--background",
        default="white",
        show_default=True,
        help="The colour under what is transparent.",
    ),
    click.option(
        "--allow-truncated",
        is_flag=True,
        help="Caption images whose data is cut, and say so in the row.",
    ),
)
SPEED_OPTIONS = _options(
    click.option(
        "--slots",
        type=int,
        default=SPEED.slots,
        show_default=True,
        help="Captions in flight at once.",
    ),
    click.option(
        "--prefill-batch",
        type=int,
        default=SPEED.prefill_batch,
        show_default=True,
        help="Prompts that run through the network together.",
    ),
    click.option(
        "--threads", type=int, default=SPEED.threads, help="Of torch.  [default: its own choice]"
    ),
    click.option(
        "--loader-workers",
        type=int,
        default=_default_loader_workers,
        show_default="one a core, 2 to 8",
        help="Threads that read and open images.",
    ),
    click.option(
        "--rank", type=int, default=0, show_default=True, help="Which worker this is, from 0."
    ),
    click.option(
        "--world-size",
        type=int,
        default=1,
        show_default=True,
        help="How many workers share the shards.",
    ),
)
END_OPTIONS = _options(
    click.option(
        "--limit", type=int, metavar="N", help="Caption the first N samples of the job only."
    ),
    click.option(
        "--commit-rows",
        type=int,
        default=1000,
        show_default=True,
        help="Commit when so many rows wait,",
    ),
    click.option(
        "--commit-seconds",
        type=float,
        default=30.0,
        show_default=True,
        help="or when one has waited so long.",
    ),
    click.option(
        "--max-error-rate",
        type=float,
        default=1.0,
        show_default=True,
        metavar="SHARE",
        help="Stop once more than this share of 100 rows or more are errors.",
    ),
    click.option(
        "--time-limit",
        metavar="TIME",
        help="End before this time is over (90m, 3h, 1:30:00 or seconds), and exit 75.",
    ),
    click.option(
        "--grace-seconds",
        type=float,
        default=20.0,
        show_default=True,
        help="After a signal, be gone within this time.",
    ),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Move an older output aside, into OUT/_old-TIME, and start anew each time.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Show shards, samples, the final prompt, settings and memory; write nothing.",
    ),
)


@cli.command(epilog=EXIT_CODES)
@SHARDS
@click.option("--out", required=True, metavar="FOLDER", help="Where the Parquet files go.")
@MODEL_OPTIONS
@CAPTION_OPTIONS
@SPEED_OPTIONS
@END_OPTIONS
def run(**options: Any) -> None:
    """Caption every image of the shards, or go on where an earlier run ended.

    \b
    Examples:
      captionjob run --shards 'shards/*.tar' --out captions
      captionjob run --shards shards/00000.tar --out captions --limit 20 --dry-run
    """
    from jobs.commands import dry_run, run_job
    from jobs.options import run_config

    is_dry = options.pop("dry_run")
    config = run_config(options)
    sys.exit(dry_run(config) if is_dry else run_job(config))


@cli.command()
@click.argument("folder")
@click.option(
    "--out", required=True, metavar="PATTERN", help="Such as 'shards/{00000..}.tar' or a folder."
)
@click.option("--max-samples", type=int, default=1000, show_default=True, help="Of one shard.")
@click.option("--max-bytes", type=int, default=300 << 20, show_default=True, help="Of one shard.")
@click.option("--overwrite", is_flag=True, help="Replace shards of the same names.")
def pack(folder: str, out: str, max_samples: int, max_bytes: int, overwrite: bool) -> None:
    """Make shards from a folder of pictures, with the .txt and .json files beside them.

    \b
    Example:
      captionjob pack photos --out 'shards/photos-{00000..}.tar'
    """
    from jobs.commands import pack_pictures
    from pipeline.pack import PackSettings

    pack_pictures(folder, out, PackSettings(max_samples, max_bytes, overwrite))


@cli.command()
@SHARDS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def inspect(shards: tuple[str, ...], as_json: bool) -> None:
    """Read shards without a model: samples, formats, sizes, junk, duplicates, damage.

    \b
    Example:
      captionjob inspect --shards 'shards/*.tar'
    Exit code 1 if any shard is damaged.
    """
    from jobs.inspection import inspect_shards

    sys.exit(inspect_shards(shards, as_json=as_json))


@cli.command()
def models() -> None:
    """List the networks that --model can name.

    \b
    Example:
      captionjob models
    """
    from jobs.commands import list_models

    list_models()


for _command in RESULT_COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Run the command line; every failure that has an explanation is one line on stderr."""
    try:
        code = cli.main(prog_name="captionjob", standalone_mode=False)
    except click.exceptions.Abort:
        _fail("aborted", 130)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except RequestError as error:
        _fail(str(error), 2)
    except CaptionJobError as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    print(f"captionjob: error: {printable(line)}", file=sys.stderr)
    sys.exit(code)
