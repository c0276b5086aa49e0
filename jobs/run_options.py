"""The options of `captionjob run`, in the groups in which people think of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.output.waiting import STORE_RETRY_SECONDS

Command = TypeVar("Command", bound=Callable[..., Any])
SAMPLING = SamplingSettings()
SPEED = SpeedSettings()


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
    help="A tar or Parquet file, a folder of them or of pictures, a glob, or braces "
    "such as 'data/{00000..00099}.tar'; repeatable.",
)
ALLOW_PIPE = click.option(
    "--allow-pipe",
    is_flag=True,
    help="Run commands such as 'pipe:curl -sf URL' for their output, without a shell.",
)
LENIENT_END = click.option(
    "--lenient-end",
    is_flag=True,
    help="Take a tar without an end marker, or with a long tail of zeros, for whole.",
)
COLUMN_OPTIONS = _options(
    click.option(
        "--image-column",
        metavar="NAME",
        help="Of Parquet shards, the column of images.  [default: found in the schema]",
    ),
    click.option(
        "--key-column",
        metavar="NAME",
        help="Of Parquet shards, the column of keys.  [default: the number of the row]",
    ),
)
INPUT_OPTIONS = _options(SHARDS, ALLOW_PIPE, LENIENT_END, COLUMN_OPTIONS)
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
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="cpu, cuda, cuda:N or mps; workers of one machine take a GPU each.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="How wide the network's numbers are.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["none", "int8"]),
        default="none",
        show_default=True,
        help="int8: 8-bit weights and activations where that is faster; other captions, therefore "
        "a setting of the job. Our own networks on a processor with VNNI or AMX.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Let the transformers library run Python code that a checkpoint brings.",
    ),
)
CAPTION_OPTIONS = _options(
    click.option(
        "--prompt", help="A template such as 'Describe {json.title}.'  [default: the model's own]"
    ),
    click.option("--system", help="A system prompt, for models that were taught with one."),
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
        "--max-text-tokens",
        type=int,
        default=SAMPLING.max_text_tokens,
        show_default=True,
        help="Room for a prompt beside its image; a longer one is an error row.",
    ),
    click.option(
        "--max-repeats",
        type=int,
        default=SAMPLING.max_repeats,
        show_default=True,
        help="End a caption that says the same thing so often in a row; 0: off.",
    ),
    click.option(
        "--num-captions",
        type=int,
        default=SAMPLING.num_captions,
        show_default=True,
        help="Captions of each image, a row each.",
    ),
    click.option(
        "--dedupe",
        is_flag=True,
        help="Caption identical images of a shard once (the same bytes, the same prompt) and copy "
        "the first one's caption, mean_logprob and all, to the rows of the others. A sampled "
        "caption then depends on --seed and the image, no longer on the key.",
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
        "--threads",
        type=int,
        default=SPEED.threads,
        help="Of torch.  [default: its own choice, or fewer where a small network is measured to "
        "be faster so; a share of the cores where several workers share them]",
    ),
    click.option(
        "--loader-workers",
        type=int,
        show_default="one a core of its own, 2 to 8",
        help="Threads that read and open images.",
    ),
)
WORKER_OPTIONS = _options(
    click.option(
        "--rank", type=int, help="Which worker this is, from 0.  [default: as the engine tells]"
    ),
    click.option("--world-size", type=int, help="How many workers share the shards."),
    click.option(
        "--workers",
        default="1",
        show_default=True,
        metavar="N|auto",
        help="Processes on this machine: one a GPU, or a share of the cores each.",
    ),
    click.option(
        "--claim",
        is_flag=True,
        help="Take shards one by one, by lease, so that a dead worker's are picked up.",
    ),
    click.option(
        "--lease-seconds",
        type=float,
        default=60.0,
        show_default=True,
        help="With --claim: a worker that is silent for so long has died.",
    ),
)
SPOOL_OPTIONS = _options(
    click.option(
        "--spool",
        metavar="FOLDER",
        help="Fetch remote tars ahead to this disk, so that network and captioner overlap.",
    ),
    click.option(
        "--spool-bytes",
        type=int,
        default=4 << 30,
        show_default=True,
        help="What the spool may hold.",
    ),
    click.option(
        "--spool-shards",
        type=int,
        default=2,
        show_default=True,
        help="Shards fetched at once, the one being read among them.",
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
        "--max-requeues",
        type=click.IntRange(min=0),
        metavar="N",
        help="In a job of Slurm: ask it to start this again after exit 75, at most N times.",
    ),
    click.option(
        "--store-retry-seconds",
        type=float,
        default=STORE_RETRY_SECONDS,
        show_default=True,
        help="How long to wait for an s3:// output whose store is down.",
    ),
    click.option(
        "--retry-failed",
        is_flag=True,
        help="Make the error rows of finished shards again, and only those.",
    ),
    click.option(
        "--retry",
        metavar="status=A,B",
        help="The same for rows of these statuses: ok, truncated, repetition, error.",
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
