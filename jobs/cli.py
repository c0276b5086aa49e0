"""The command line: parse, call one function, translate errors to one line and an exit code.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from jobs.commands_bench import bench
from jobs.commands_launch import launch
from jobs.commands_results import RESULT_COMMANDS
from jobs.requeue import requeued
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
from jobs.terminal import printable
from pipeline.errors import CaptionJobError, RequestError

EXIT_CODES = """\b
Exit codes:
  0   all done (rows of bad images are in the summary)
  1   done, but shards failed or too many rows did; a rerun is safe
  2   the request is wrong; nothing was captioned
  75  stopped by a signal or a time limit, all finished rows committed: start again
"""

# What a disk may say at any write; a rerun goes on from what was committed.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


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


@cli.command(epilog=EXIT_CODES)
@INPUT_OPTIONS
@click.option(
    "--out",
    required=True,
    metavar="FOLDER",
    help="Where the Parquet files go: a folder or s3://BUCKET/PREFIX.",
)
@MODEL_OPTIONS
@CAPTION_OPTIONS
@SPEED_OPTIONS
@SPOOL_OPTIONS
@WORKER_OPTIONS
@END_OPTIONS
def run(**options: Any) -> None:
    """Caption every image of the shards, or go on where an earlier run ended.

    \b
    Examples:
      captionjob run --shards 'shards/*.tar' --out captions
      captionjob run --shards shards/00000.tar --out captions --limit 20 --dry-run
    """
    end = partial(requeued, max_requeues=options.pop("max_requeues"), environment=os.environ)
    with nothing_done_yet(end):
        from jobs.commands import dry_run, run_job, run_workers
        from jobs.local_workers import num_workers
        from jobs.options import run_config

        is_dry, workers = options.pop("dry_run"), options.pop("workers")
        number = num_workers(workers, os.environ, options["device"])
        config = run_config(options)
        if is_dry:
            sys.exit(dry_run(config))
        if number > 1:
            words = sys.argv[sys.argv.index("run") + 1 :]
            sys.exit(end(run_workers(config, number, words)))
        sys.exit(end(run_job(config)))


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
    from pipeline.input.pack import PackSettings

    pack_pictures(folder, out, PackSettings(max_samples, max_bytes, overwrite))


@cli.command()
@INPUT_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def inspect(
    shards: tuple[str, ...],
    allow_pipe: bool,
    lenient_end: bool,
    image_column: str | None,
    key_column: str | None,
    as_json: bool,
) -> None:
    """Read shards without a model: samples, formats, sizes, junk, duplicates, damage.

    Of pictures only the headers are read: `run` finds those whose pixels are cut.

    \b
    Example:
      captionjob inspect --shards 'shards/*.tar'
    Exit code 1 if any shard is damaged.
    """
    from jobs.inspection import inspect_shards
    from pipeline.input.checks import check_fields
    from pipeline.input.reader import ReaderSettings
    from pipeline.input.shards import expand_shards, with_columns
    from pipeline.records import Columns

    found = expand_shards(shards, allow_pipe=allow_pipe)
    columns = Columns(image_column, key_column)
    found = with_columns(found, columns)
    check_fields(found, columns, frozenset())
    settings = ReaderSettings(has_lenient_end=lenient_end)
    sys.exit(inspect_shards(found, settings, as_json=as_json))


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
cli.add_command(launch)
cli.add_command(bench)


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
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _fail(f"{error.filename or 'writing'}: {error.strerror}", 1)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    print(f"captionjob: error: {printable(line)}", file=sys.stderr)
    sys.exit(code)
