"""The Slurm launcher prints a script that a shell and sbatch understand, or says why not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.fixtures import make_photo_shard
from tests.commands import captionjob, environment
from tests.jobs.launch.programs import calls, fake

SBATCH = 'cat > "$(dirname "$0")/stdin.$(wc -l < "$(dirname "$0")/sbatch.calls")"; echo "41;here"'
RUN = ("--", "--shards", "a b.tar", "--out", "out", "--model", "scripted")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    make_photo_shard(tmp_path / "a b.tar", 6)
    return tmp_path


def launch(here: Path, *options: str, array: int = 4) -> str:
    done = captionjob("launch", "slurm", f"--array={array}", *options, *RUN, cwd=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def array_of_4(task: int) -> dict[str, str]:
    names = {"ID": task, "MIN": 0, "MAX": 3, "STEP": 1, "COUNT": 4}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}


def submitted(here: Path, script: str) -> tuple[str, str]:
    """Run the script beside an sbatch of our own; return the two batch scripts that it got."""
    extra = fake(here / "bin", "sbatch", SBATCH)
    done = subprocess.run(
        ["bash", "-s"],
        input=script,
        text=True,
        capture_output=True,
        cwd=here,
        env=environment(extra),
    )
    assert done.returncode == 0, done.stderr
    assert "submitted 4 workers as job 41" in done.stdout
    assert calls(here / "bin", "sbatch") == ["--parsable", "--parsable --dependency=afterany:41"]
    return (here / "bin" / "stdin.1").read_text(), (here / "bin" / "stdin.2").read_text()


def test_the_script_submits_an_array_and_a_check_after_any_outcome(here: Path) -> None:
    options = ("--gpus=1", "--time=90m", "--mem=16G", "--partition=a", "--max-running=2")
    worker, check = submitted(here, launch(here, *options, "--sbatch=--qos=low"))
    for line in (
        "--array=0-3%2",
        "--gpus=1",
        "--time=0-01:30:00",
        "--mem=16G",
        "--partition=a",
        "--qos=low",
        "--requeue",
        "--signal=B:USR1@120",
        "--open-mode=append",
    ):
        assert f"#SBATCH {line}\n" in worker
    assert "--gpus" not in check
    assert "#SBATCH --partition=a\n" in check
    assert " verify out --shards 'a b.tar'\n" in check
    assert (here / "logs").is_dir()


def test_the_workers_of_the_script_caption_all_together(here: Path) -> None:
    """One shard and four workers: each image has one of them, told by Slurm's variables."""
    worker, _ = submitted(here, launch(here, "--setup", "export TOLD=yes; echo $TOLD"))
    num_images = 0
    for rank in range(4):
        done = subprocess.run(
            ["bash", "-s"],
            input=worker,
            text=True,
            capture_output=True,
            cwd="/",
            env=environment(array_of_4(rank)),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("yes\n")
        assert f"worker {rank} of 4 (Slurm array)" in done.stderr
        found = re.search(r"^(\d+) images? captioned", done.stdout, re.MULTILINE)
        assert found, done.stdout
        num_images += int(found[1])
    assert num_images == 6
    assert len(list(here.glob("out/*.parquet"))) == 1


def test_submit_runs_the_script_and_passes_on_why_sbatch_refuses(here: Path) -> None:
    extra = fake(here / "bin", "sbatch", SBATCH)
    words = ("launch", "slurm", "--array=4", "--submit", *RUN)
    done = captionjob(*words, cwd=here, extra=extra)
    assert done.returncode == 0, done.stderr
    assert "submitted 4 workers as job 41, logs in logs; a check follows as job 41" in done.stdout
    fake(here / "bin", "sbatch", "echo 'invalid partition' >&2; exit 1")
    done = captionjob(*words, cwd=here, extra=extra)
    assert done.returncode == 2
    assert done.stderr == "captionjob: error: sbatch refused the job: invalid partition\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--array=4", "--", *RUN[1:], "--rank=1"], "--rank goes with no launcher"),
        (["--array=4", "--", *RUN[1:], "--overwrite"], "--overwrite goes with no launcher"),
        (["--array=4", "--", *RUN[1:], "--limit=1"], "--limit goes with no launcher"),
        (["--array=4", "--", *RUN[1:], "--slots=none"], "'none' is not a valid integer"),
        (["--array=4", "--", "--out=out"], "Missing option '--shards'"),
        (["--array=4", "--", *RUN[1:], "--model=there-is-none"], "there-is-none"),
        (["--array=4", "--", *RUN[1:], "--prompt=a\nb"], "has a line break"),
        (["--array=4"], "no options of `captionjob run` were given"),
        (["--array=0", *RUN], "0 is not in the range"),
        (["--array=4", "--time=60", *RUN], "wanted more than --signal-seconds"),
        (["--array=4", "--time=soon", *RUN], "--time is 'soon'"),
        (["--array=4", "--signal-seconds=20", *RUN], "--signal-seconds is 20; wanted at least"),
        (["--array=4", "--partition=a b", *RUN], "--partition is 'a b'"),
        (["--array=4", "--mem=lots", *RUN], "--mem is 'lots'"),
        (["--array=4", "--sbatch=qos", *RUN], "--sbatch is 'qos'"),
        (["--array=4", "--logs=a%b", *RUN], "--logs is 'a%b'"),
    ],
)
def test_a_wrong_request_is_one_line_before_anything_is_printed(
    here: Path, words: list[str], message: str
) -> None:
    done = captionjob("launch", "slurm", *words, cwd=here)
    assert done.returncode == 2
    assert not done.stdout
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
