"""The commands that look at captions: status, report, verify, export, import, compare.

Thin skins, as in `jobs.cli`: parse, call one function, exit with its code. Nothing heavy is
imported before a command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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

    print_status(out, shards, sys.stdout, as_json=as_json, is_watching=watch, seconds=interval)


@click.command()
@OUT
@click.option("--shards", multiple=True, required=True, metavar="PATTERN", help=SHARDS_HELP)
@click.option(
    "--to", default="report.html", show_default=True, metavar="FILE", help="The page to write."
)
@click.option(
    "--pictures",
    type=click.IntRange(0, 2000),
    default=500,
    show_default=True,
    help="At most so many pictures.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random sample."
)
def report(out: str, shards: tuple[str, ...], to: str, pictures: int, seed: int) -> None:
    """Write one HTML file that shows the captions beside their pictures, and how the job went.

    It needs no network and no other file. Needs: pip install 'captionjob[report]'

    \b
    Example:
      captionjob report captions --shards 'shards/*.tar' --to report.html
    """
    from jobs.report.view import print_report

    print_report(out, shards, to, pictures, seed)


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
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="For --sample, let the transformers library run code that a checkpoint brings.",
)
@click.option(
    "--lenient-end", is_flag=True, help="As in run: a tar without an end marker is whole."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    out: str,
    shards: tuple[str, ...],
    sample: int | None,
    seed: int,
    model: str | None,
    device: str,
    trust_remote_code: bool,
    lenient_end: bool,
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

    wanted = (
        None if sample is None else SampleRequest(sample, seed, model, device, trust_remote_code)
    )
    code = print_verification(
        out, shards, wanted, sys.stdout, as_json=as_json, has_lenient_end=lenient_end
    )
    sys.exit(code)


FORMATS = ("webdataset", "txt", "jsonl", "csv", "parquet", "coco", "label-studio", "hf")


@click.command()
@OUT
@click.argument("dest", metavar="DEST")
@click.option("--to", required=True, type=click.Choice(FORMATS), help="The format of DEST.")
@click.option(
    "--shards",
    multiple=True,
    metavar="PATTERN",
    help="Where the pictures are; each row's join to its image is checked.",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(["ok", "truncated", "repetition", "error"]),
    help="Only rows of this status; repeatable.  [default: all with a caption; tables: all]",
)
@click.option("--min-logprob", type=float, help="Only rows with so high a mean_logprob.")
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only rows such as 'width >= 512' or 'caption !~ dog|cat'; repeatable.",
)
@click.option(
    "--captions",
    type=click.Choice(["corrected", "model"]),
    default="corrected",
    show_default=True,
    help="People's corrections where there are any, or the model's own words.",
)
@click.option(
    "--field",
    default="txt",
    show_default=True,
    help="webdataset: the caption is the member KEY.FIELD.",
)
@click.option("--replace", is_flag=True, help="webdataset: in place of a member of that name.")
@click.option("--no-images", is_flag=True, help="txt: the captions without the pictures.")
@click.option(
    "--image-url",
    default="",
    metavar="TEMPLATE",
    help="label-studio, coco: where each picture is served, such as 'https://host/{key}.jpg'.",
)
@click.option("--table", metavar="FILE", help="parquet: join the captions into this table.")
@click.option(
    "--on", default="key", show_default=True, help="parquet: the column to join --table by."
)
@click.option("--overwrite", is_flag=True, help="Replace an older export at DEST.")
def export(out: str, dest: str, to: str, shards: tuple[str, ...], **options: Any) -> None:
    """Write the captions in a format of annotation or training tools.

    \b
    Examples:
      captionjob export captions tars --to webdataset --shards 'shards/*.tar' --status ok
      captionjob export captions lora --to txt --shards 'shards/*.tar' --min-logprob -1
      captionjob export captions all.parquet --to parquet --where 'width >= 512'
      captionjob export captions tasks.json --to label-studio --shards 'shards/*.tar'
    """
    from jobs.export.view import run_export

    run_export(out, dest, to, shards, options)


@click.command(name="import")
@OUT
@click.argument("file", metavar="FILE")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Choice(["label-studio"]),
    help="The tool that wrote FILE: its JSON or JSON-MIN export.",
)
def import_(out: str, file: str, source: str) -> None:
    """Store captions that people corrected, beside the model's, with who changed what.

    The corrections lie in OUT/_corrections; exports take them, the model's captions stay.

    \b
    Example:
      captionjob import captions project-1.json --from label-studio
    """
    from jobs.export.view import run_import

    run_import(out, file)


@click.command()
@click.argument("out_a", metavar="OUT_A")
@click.argument("out_b", metavar="OUT_B")
@click.option(
    "--shards", multiple=True, metavar="PATTERN", help="Where the pictures are, for the page."
)
@click.option("--to", metavar="FILE", help="Write a page with both captions under each picture.")
@click.option(
    "--references",
    metavar="FIELD",
    help="Score both against this field of each sample, such as txt (one a line) or json.captions.",
)
@click.option(
    "--pictures",
    type=click.IntRange(1, 2000),
    default=300,
    show_default=True,
    help="At most so many pictures.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random sample."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(
    out_a: str,
    out_b: str,
    shards: tuple[str, ...],
    to: str | None,
    references: str | None,
    pictures: int,
    seed: int,
    as_json: bool,
) -> None:
    """Hold two outputs of the same images together: two models, or two prompts.

    \b
    Examples:
      captionjob compare captions-a captions-b
      captionjob compare captions-a captions-b --shards 'shards/*.tar' --to compare.html
      captionjob compare captions-a captions-b --shards 'shards/*.tar' --references txt
    """
    from jobs.compare.make import CompareRequest
    from jobs.compare.view import print_comparison

    request = CompareRequest(out_a, out_b, shards, references, pictures, seed)
    print_comparison(request, None if to is None else Path(to), as_json=as_json)


RESULT_COMMANDS = (status, report, verify, export, import_, compare)
