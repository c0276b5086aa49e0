"""`captionjob launch`: the same job as many workers, on an engine that a cluster already has.

Thin skins, as in `jobs.cli`. What stands behind `--` are options of `captionjob run`; they are
checked before anything is printed or submitted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.stopping import nothing_done_yet

if TYPE_CHECKING:
    from jobs.launch.run_words import RunWords

RUN_WORDS = click.argument("run_options", nargs=-1, type=click.UNPROCESSED)
NAME = click.option("--name", default="captionjob", show_default=True, help="Of the job.")
MAX_RUNNING = click.option(
    "--max-running", type=click.IntRange(min=1), metavar="N", help="Workers at the same time."
)
GPUS = click.option(
    "--gpus",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of each worker; a worker drives one.",
)


@click.group()
def launch() -> None:
    """Start a job as many workers: a Slurm array, Ray actors, a Kubernetes Indexed Job.

    \b
    Example:
      captionjob launch slurm --array 64 --gpus 1 -- --shards '/data/*.tar' --out /data/captions
    """


def _run_words(words: tuple[str, ...]) -> RunWords:
    from jobs.launch.run_words import RunWords

    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return RunWords.parse(group.commands["run"], words)


@launch.command()
@click.option(
    "--array", type=click.IntRange(min=1), required=True, metavar="N", help="How many workers."
)
@click.option("--time", metavar="TIME", help="Limit of each worker's run: 4:00:00, 90m.")
@GPUS
@click.option(
    "--cpus", type=click.IntRange(min=1), default=4, show_default=True, help="Of each worker."
)
@click.option("--mem", metavar="SIZE", help="Of each worker, such as 16G.")
@click.option("--partition", help="Slurm's partition.")
@click.option("--account", help="Slurm's account.")
@MAX_RUNNING
@click.option(
    "--signal-seconds",
    type=click.IntRange(min=1),
    default=120,
    show_default=True,
    help="Before the limit, a worker is told to commit and exit 75.",
)
@click.option(
    "--max-requeues",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="How often a worker may be started again.",
)
@NAME
@click.option(
    "--logs", default="logs", show_default=True, metavar="FOLDER", help="A file a worker goes here."
)
@click.option(
    "--setup", multiple=True, metavar="LINE", help="Shell before the worker starts; repeatable."
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="A further option of sbatch, such as --sbatch=--qos=low; repeatable.",
)
@click.option("--submit", is_flag=True, help="Submit the script instead of printing it.")
@RUN_WORDS
def slurm(run_options: tuple[str, ...], submit: bool, logs: str, **options: Any) -> None:
    """Print a script that submits an array of workers to Slurm, and a `verify` behind it.

    A worker that is told to stop (time limit, preemption) commits and is started again. The
    check runs after the array, whatever became of it. Give the same command again to go on.

    \b
    Examples:
      captionjob launch slurm --array 64 --gpus 1 --time 4:00:00 -- \\
          --shards '/data/{0000..0999}.tar' --out /data/captions > job.sh && bash job.sh
      captionjob launch slurm --array 64 --submit -- --shards '/data/*.tar' --out /data/captions
    """
    from jobs.launch.slurm import SlurmSettings, slurm_script, submit_script

    settings = SlurmSettings(logs=Path(logs), **options)
    run = _run_words(run_options)
    run.check()
    script = slurm_script(settings, run)
    if submit:
        submit_script(script)
    else:
        click.echo(script, nl=False)


@launch.command()
@click.option(
    "--completions",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="How many workers.",
)
@click.option("--image", required=True, help="What scripts/Containerfile was built to.")
@NAME
@click.option("--namespace", help="Where the job lives.  [default: kubectl's own]")
@MAX_RUNNING
@GPUS
@click.option("--cpus", default="4", show_default=True, metavar="QUANTITY", help="Of each worker.")
@click.option(
    "--memory", default="16Gi", show_default=True, metavar="QUANTITY", help="Of each worker."
)
@click.option(
    "--pvc",
    multiple=True,
    metavar="NAME:/path[:ro]",
    help="A persistent volume claim, and where the workers see it; repeatable.",
)
@click.option(
    "--secret",
    multiple=True,
    metavar="NAME",
    help="A Secret whose keys become variables, such as AWS_ACCESS_KEY_ID; repeatable.",
)
@click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="A variable, not a secret one; repeatable."
)
@click.option(
    "--node-selector", multiple=True, metavar="LABEL=VALUE", help="Which nodes; repeatable."
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Of a worker that crashed or left failed shards; exit 75 and evictions do not count.",
)
@RUN_WORDS
def kubernetes(
    run_options: tuple[str, ...],
    pvc: tuple[str, ...],
    secret: tuple[str, ...],
    **options: Any,
) -> None:
    """Print the manifest of an Indexed Job: one pod a worker.

    A pod that is evicted or told to stop commits, and another goes on; a wrong request fails the
    job at once. Paths are those that the pods see, so that only options are checked here.

    \b
    Examples:
      captionjob launch kubernetes --completions 64 --gpus 1 --image registry/captionjob:1 \\
          --pvc data:/data -- --shards '/data/shards/*.tar' --out /data/captions > job.yaml
      captionjob launch kubernetes --completions 8 --image registry/captionjob:1 \\
          --secret s3-keys -- --shards 's3://bucket/*.tar' --out s3://bucket/captions
    """
    from jobs.launch.kubernetes import KubernetesSettings, Volume, kubernetes_manifest

    volumes = tuple(Volume.parse(text) for text in pvc)
    settings = KubernetesSettings(volumes=volumes, secrets=secret, **options)
    click.echo(kubernetes_manifest(settings, _run_words(run_options)), nl=False)


@launch.command("ray")
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Of the cluster.  [default: RAY_ADDRESS, or the one on this machine]",
)
@click.option(
    "--actors",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many hold the network.  [default: as the cluster has room]",
)
@click.option(
    "--cpus", type=click.FloatRange(min=0), default=4.0, show_default=True, help="Of each actor."
)
@click.option(
    "--gpus", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of each actor."
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many actors a share may lose before the job ends.",
)
@RUN_WORDS
def ray_(run_options: tuple[str, ...], **options: Any) -> None:
    """Run a job on a Ray cluster: actors that hold the network take shares of the shards.

    The share of an actor that dies goes to another one. One bar, or one line, shows them all.
    Needs: pip install 'captionjob[ray]', on all nodes.

    \b
    Examples:
      captionjob launch ray --address auto --gpus 1 -- --shards '/data/*.tar' --out /data/captions
      captionjob launch ray --actors 8 --cpus 2 -- --shards '/data/*.tar' --out /data/captions
    """
    with nothing_done_yet():
        from jobs.launch.ray_driver import RaySettings, run_on_ray

        run = _run_words(run_options)
        run.need_absolute("Ray's nodes")
        run.refuse("claim", "the driver hands out the shards")
        run.refuse("workers", "there are --actors")
        sys.exit(run_on_ray(run.config, RaySettings(**options)))
