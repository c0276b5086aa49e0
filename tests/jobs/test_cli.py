"""Every command as a process: what it prints, its exit code, and one line for each bad input."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import cli, options
from jobs.config import LimitSettings, RunConfig, WorkerSettings
from jobs.terminal import printable
from pipeline.errors import RequestError
from pipeline.fixtures import make_image_bytes, make_photo_shard, make_tar_bytes
from pipeline.images.opening import ImageSettings
from pipeline.output.store import CommitSettings
from tests.commands import captionjob, environment

RUN = ("run", "--shards", "a.tar", "--out", "out", "--model", "scripted")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    make_photo_shard(tmp_path / "a.tar", 6)
    return tmp_path


def test_run_prints_a_summary_and_where_the_parquet_lies(here: Path) -> None:
    done = captionjob(*RUN, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "6 images captioned" in done.stdout
    assert "out/*.parquet (1 file)" in done.stdout
    assert "1 shard: 0 done, 0 partly done, 1 to do" in done.stderr
    again = captionjob(*RUN, cwd=here)
    assert again.returncode == 0
    assert "1 done, 0 partly done, 0 to do; 6 rows kept" in again.stderr
    assert "0 images captioned" in again.stdout


def test_error_rows_leave_the_exit_code_at_0_and_are_counted(here: Path) -> None:
    (here / "b.tar").write_bytes(make_tar_bytes([("x.jpg", b"?"), ("y.jpg", b"")]))
    done = captionjob(*RUN, "--shards", "b.tar", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "2 rows of these are errors: 1 unreadable, 1 empty" in done.stdout


def test_a_damaged_shard_gives_exit_code_1_and_its_reason(here: Path) -> None:
    whole = (here / "a.tar").read_bytes()
    (here / "cut.tar").write_bytes(whole[: len(whole) // 2])
    done = captionjob(*RUN, "--shards", "cut.tar", cwd=here)
    assert done.returncode == 1
    assert "1 shard failed, see out/_failed.json" in done.stdout
    assert "damaged at byte" in done.stdout
    assert "captions    out/*.parquet (1 file)" in done.stdout
    assert "Traceback" not in done.stderr


def test_settings_reach_the_output(here: Path) -> None:
    done = captionjob(
        *RUN,
        *("--prompt", "Say it.", "--num-captions", "2", "--temperature", "0.5", "--top-p", "0.9"),
        *("--stop", "END", "--stop", ".", "--keep", "json.title", "--seed", "7"),
        *("--background", "#102030", "--allow-truncated", "--max-pixels", "1000"),
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads((here / "out" / "_job.json").read_text())["settings"]
    wanted = {
        "prompt": "Say it.",
        "num_captions": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END", "."],
        "keep": ["json.title"],
        "seed": 7,
        "background": "#102030",
        "allow_truncated": True,
        "max_pixels": 1000,
    }
    assert wanted.items() <= settings.items()
    (path,) = (here / "out").glob("*.parquet")
    assert pq.read_metadata(path).num_rows == 12
    assert "json.title" in pq.read_schema(path).names


def test_dry_run_shows_the_plan_and_writes_nothing(here: Path) -> None:
    done = captionjob(*RUN, "--dry-run", "--prompt", "Say {key}.", cwd=here)
    assert done.returncode == 0, done.stderr
    for words in (
        "1 shard: 0 done",
        "a.tar",
        "prompt 'Say 00000.'",
        "2 ids",
        "seed = 0",
        "memory: cache",
        "32x24 JPEG",
        "nothing was written",
    ):
        assert words in done.stdout
    assert sorted(os.listdir(here)) == ["a.tar"]


def test_overwrite_starts_anew_and_keeps_the_old_output(here: Path) -> None:
    captionjob(*RUN, cwd=here)
    refused = captionjob(*RUN, "--seed", "1", cwd=here)
    assert refused.returncode == 2
    assert "seed: 0 there, 1 now" in refused.stderr
    done = captionjob(*RUN, "--seed", "1", "--overwrite", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "the older output was moved to out/_old-" in done.stderr
    assert len(list(here.glob("out/_old-*/*.parquet"))) == 1
    assert len(list(here.glob("out/*.parquet"))) == 1


BAD_REQUESTS = {
    "no shards": (["run", "--out", "out"], "--shards"),
    "no out": (["run", "--shards", "a.tar"], "--out"),
    "empty pattern": (["run", "--shards", "", "--out", "out"], "is empty"),
    "missing shard": (["run", "--shards", "no.tar", "--out", "out"], "no.tar"),
    "missing in range": (["run", "--shards", "{a,b}.tar", "--out", "out"], "1 of 2"),
    "no match": (["run", "--shards", "*.nothing", "--out", "out"], "matches no file"),
    "folder without tars": (
        ["run", "--shards", "empty", "--out", "out"],
        "no tar, Parquet file or picture in it",
    ),
    "remote": (["run", "--shards", "ftp://x/a.tar", "--out", "out"], "ftp"),
    "pipe": (["run", "--shards", "pipe:rm -rf x", "--out", "out"], "pipe:"),
    "out is a file": (["run", "--shards", "a.tar", "--out", "a.tar"], "is a file"),
    "out below a file": (["run", "--shards", "a.tar", "--out", "a.tar/x"], "not a folder"),
    "out is foreign": (["run", "--shards", "a.tar", "--out", "."], "not made by captionjob"),
    "out is no place": (["run", "--shards", "a.tar", "--out", "/proc/x"], "--out '/proc/x'"),
    "no such option": ([*RUN, "--sloots", "3"], "--sloots"),
    "no number": ([*RUN, "--slots", "many"], "--slots"),
    "slots": ([*RUN, "--slots", "0"], "--slots is 0"),
    "prefill batch": ([*RUN, "--prefill-batch", "0"], "--prefill-batch is 0"),
    "threads": ([*RUN, "--threads", "-1"], "--threads is -1"),
    "loader workers": ([*RUN, "--loader-workers", "0"], "--loader-workers is 0"),
    "new tokens": ([*RUN, "--max-new-tokens", "0"], "--max-new-tokens is 0"),
    "min tokens": ([*RUN, "--min-new-tokens", "99"], "--min-new-tokens is 99"),
    "temperature": ([*RUN, "--temperature", "-1"], "--temperature is -1"),
    "temperature nan": ([*RUN, "--temperature", "nan"], "--temperature is nan"),
    "top p": ([*RUN, "--temperature", "1", "--top-p", "0"], "--top-p is 0"),
    "top p greedy": ([*RUN, "--top-p", "0.5"], "--temperature above 0"),
    "penalty": ([*RUN, "--repetition-penalty", "0"], "--repetition-penalty is 0"),
    "seed": ([*RUN, "--seed", "-1"], "--seed is -1"),
    "stop": ([*RUN, "--stop", ""], "--stop"),
    "captions": ([*RUN, "--num-captions", "2"], "needs --temperature"),
    "pixels": ([*RUN, "--max-pixels", "0"], "--max-pixels is 0"),
    "background": ([*RUN, "--background", "blurple"], "blurple"),
    "prompt": ([*RUN, "--prompt", "{"], "--prompt"),
    "keep": ([*RUN, "--keep", "{x}"], "{x}"),
    "keep a column": ([*RUN, "--keep", "caption"], "--keep caption"),
    "keep twice": ([*RUN, "--keep", "txt", "--keep", "txt"], "--keep txt"),
    "limit": ([*RUN, "--limit", "0"], "--limit is 0"),
    "limit of workers": (
        [*RUN, "--limit", "3", "--rank", "0", "--world-size", "2"],
        "--limit",
    ),
    "rank": ([*RUN, "--rank", "2", "--world-size", "2"], "worker 2 of 2"),
    "rank alone": ([*RUN, "--rank", "0"], "--rank is given without --world-size"),
    "world size alone": ([*RUN, "--world-size", "2"], "--world-size is given without --rank"),
    "commit rows": ([*RUN, "--commit-rows", "0"], "--commit-rows is 0"),
    "commit seconds": ([*RUN, "--commit-seconds", "0"], "--commit-seconds is 0"),
    "retry": ([*RUN, "--retry", "error"], "--retry is 'error'"),
    "retry and overwrite": ([*RUN, "--retry-failed", "--overwrite"], "--overwrite"),
    "error rate": ([*RUN, "--max-error-rate", "2"], "--max-error-rate is 2"),
    "time limit": ([*RUN, "--time-limit", "soon"], "--time-limit"),
    "short time limit": ([*RUN, "--time-limit", "5"], "--grace-seconds"),
    "grace": ([*RUN, "--grace-seconds", "0"], "--grace-seconds is 0"),
    "backend": ([*RUN, "--backend", "magic"], "--backend"),
    "dtype": ([*RUN, "--dtype", "int3"], "--dtype"),
    "quantize": ([*RUN, "--quantize", "int4"], "--quantize"),
    "quantize scripted": ([*RUN, "--quantize", "int8"], "--model scripted has no weights"),
    "scripted": ([*RUN[:-1], "scripted:speed=9"], "speed"),
    "model folder": ([*RUN[:-1], "./no-model"], "./no-model"),
    "model folder empty": ([*RUN[:-1], "empty"], "config.json"),
    "model a file": ([*RUN[:-1], "a.tar"], "is a file"),
    "pack nothing": (["pack", "empty", "--out", "s-{000..}.tar"], "no picture"),
    "pack no folder": (["pack", "nowhere", "--out", "s-{000..}.tar"], "is not a folder"),
    "inspect nothing": (["inspect", "--shards", "no.tar"], "no.tar"),
    "no such command": (["dance"], "dance"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_one_line_and_exit_code_2(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, for speed; `test_the_process_says_it_too` runs some for real."""
    (here / "empty").mkdir()
    arguments, words = BAD_REQUESTS[name]
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["captionjob", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert error.startswith("captionjob: error: ")
    assert error.count("\n") == 1
    assert words in error
    assert sorted(os.listdir(here)) == ["a.tar", "empty"]


@pytest.mark.parametrize("name", ["missing shard", "slots", "model folder", "out is foreign"])
def test_the_process_says_it_too(here: Path, name: str) -> None:
    arguments, words = BAD_REQUESTS[name]
    done = captionjob(*arguments, cwd=here)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_pack_makes_shards_that_run_reads(here: Path) -> None:
    (here / "photos" / "sub").mkdir(parents=True)
    for place in range(5):
        (here / "photos" / "sub" / f"{place}.jpg").write_bytes(make_image_bytes(seed=place))
    packed = captionjob("pack", "photos", "--out", "s/p-{000..}.tar", "--max-samples=2", cwd=here)
    assert packed.returncode == 0, packed.stderr
    assert "5 images" in packed.stdout
    assert "in 3 shards" in packed.stdout
    done = captionjob("run", "--shards", "s", "--out", "out", "--model", "scripted", cwd=here)
    assert "5 images captioned" in done.stdout


def test_models_lists_the_families(here: Path) -> None:
    done = captionjob("models", cwd=here)
    assert done.returncode == 0
    assert "--model default" in done.stdout


def test_help_imports_nothing_heavy_and_answers_at_once(here: Path) -> None:
    code = (
        "import sys, jobs.cli; sys.argv = ['captionjob', 'run', '--help']\n"
        "try: jobs.cli.main()\n"
        "finally: print([m for m in ('torch', 'pyarrow', 'PIL', 'numpy', 'tqdm')"
        " if m in sys.modules])"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 10, "0.2 s where nothing else runs"


def test_nothing_from_a_shard_reaches_the_terminal_raw(here: Path) -> None:
    name = "\x1b]0;owned\x07evil\x1b[2J.jpg"
    (here / "e.tar").write_bytes(make_tar_bytes([(name, make_image_bytes())]))
    done = captionjob(
        *("run", "--shards", "e.tar", "--out", "out", "--model", "scripted", "--dry-run"),
        *("--prompt", "{key}"),
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    assert "evil" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert printable("a\x1b[2J\u202eb\n") == "a\\x1b[2J\\u202eb\\n"


def test_a_terminal_gets_a_bar_that_moves(here: Path) -> None:
    main, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs", *RUN[:-1], "scripted:latency=0.4", "--slots", "1"],
        cwd=here,
        env={**environment(), "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(main)
    process.communicate(timeout=30)
    text = shown.decode()
    assert process.returncode == 0
    assert "images/s" in text
    assert "slots" in text
    assert "100%" in text
    assert text.count("\r") > 2, "drawn again and again"


def test_a_log_file_gets_plain_lines(here: Path) -> None:
    done = captionjob(*RUN[:-1], "scripted:latency=0.4", "--slots", "1", cwd=here)
    assert "\r" not in done.stderr
    assert "images of about 6" in done.stderr
    assert "images/s" in done.stderr


def test_defaults_of_the_command_line_are_those_of_the_settings() -> None:
    context = cli.run.make_context("run", ["--shards", "a", "--out", "b"])
    config = options.run_config(context.params)
    plain = RunConfig(shards=("a",), out=Path("b"))
    assert config.sampling == plain.sampling
    assert config.speed == plain.speed
    assert config.images == ImageSettings()
    assert config.commit == CommitSettings()
    assert config.limits == LimitSettings()
    assert config.worker.place == WorkerSettings().place


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90m", 5400),
        ("1h30m", 5400),
        ("2:05", 125),
        ("1:30:00", 5400),
        ("1-00:00:01", 86401),
    ],
)
def test_times_are_read_as_schedulers_write_them(text: str, seconds: float) -> None:
    assert options.seconds_of(text) == seconds


def test_a_time_that_is_none_is_refused() -> None:
    for text in ("", "soon", "1:2:3:4", "-3", "3x"):
        with pytest.raises(RequestError):
            options.seconds_of(text)
