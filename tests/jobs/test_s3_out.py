"""A job whose output lies in a store, and the commands that read it there."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from pipeline.fixtures import make_image_bytes, make_photo_shard, make_shard
from tests.commands import captionjob, start
from tests.s3_server import S3Server
from tests.torture import torture

OUT = "s3://bucket/captions"
SAMPLES = 30


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(page=3) as server:
        yield server


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for number in range(2):
        make_photo_shard(tmp_path / f"{number}.tar", SAMPLES, seed=1000 * number)
    broken = [("a.jpg", make_image_bytes(seed=5)), ("b.jpg", b"\xff\xd8\xff no picture")]
    make_shard(tmp_path / "2.tar", broken)
    return tmp_path


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    here: Path,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Run commands in this process: they start sooner."""
    monkeypatch.chdir(here)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)

    def run_here(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["captionjob", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return run_here


def run(out: str, *more: str) -> list[str]:
    return ["run", "--shards", "*.tar", "--out", out, "--model", "scripted", *more]


def rows_of(files: dict[str, bytes]) -> dict[str, list[dict[str, object]]]:
    return {
        name: pq.ParquetFile(io.BytesIO(data)).read(use_threads=False).to_pylist()
        for name, data in files.items()
        if name.endswith(".parquet") and "/" not in name
    }


def test_the_rows_are_those_of_a_local_run_and_every_command_reads_them(
    here: Path, server: S3Server, command: Command
) -> None:
    done = command(*run("local"))
    assert done.returncode == 0, done.stderr
    partly = command(*run(OUT, "--limit", "40"))
    assert partly.returncode == 0, partly.stderr
    assert server.files("bucket/captions/_progress")
    done = command(*run(OUT))
    assert done.returncode == 0, done.stderr
    assert "40 rows kept" in done.stderr
    assert f"captions    {OUT}/*.parquet (3 files)" in done.stdout
    found = server.files("bucket/captions")
    local = {path.name: path.read_bytes() for path in (here / "local").glob("*.parquet")}
    assert {name: data for name, data in found.items() if name in local} == local
    assert not any(name.startswith(("_progress/", "_uploads/")) for name in found)

    status = command("status", OUT, "--shards", "*.tar", "--json")
    told = json.loads(status.stdout)
    assert (told["out"], told["rows"]["total"]) == (OUT, 2 * SAMPLES + 2)
    assert {one["state"] for one in told["workers"]} <= {"ended", "replaced"}
    verified = command("verify", OUT, "--shards", "*.tar")
    assert verified.stdout.endswith("all holds\n"), verified.stdout + verified.stderr
    exported = command("export", OUT, "all.jsonl", "--to", "jsonl")
    assert exported.returncode == 0, exported.stderr
    assert len((here / "all.jsonl").read_text().splitlines()) == 2 * SAMPLES + 2
    compared = command("compare", OUT, "local", "--json")
    assert json.loads(compared.stdout)["same"] == 2 * SAMPLES + 2

    secret = server.environment()["AWS_SECRET_ACCESS_KEY"].encode()
    shown = [one.stdout + one.stderr for one in (done, status, verified, exported, compared)]
    assert not any(secret in data for data in [*found.values(), "".join(shown).encode()])


def test_failed_rows_are_made_again_and_an_older_output_is_moved_aside(
    here: Path, server: S3Server, command: Command
) -> None:
    failing = [*run(OUT)[:-1], "scripted:fail=000"]
    assert command(*failing).returncode == 0
    before = rows_of(server.files("bucket/captions"))
    errors = [row["key"] for rows in before.values() for row in rows if row["error"] == "internal"]
    retried = command(*failing, "--retry-failed")
    assert retried.returncode == 0, retried.stderr
    assert "of finished shards made again" in retried.stderr
    assert rows_of(server.files("bucket/captions")) == before, "they fail again"
    refused = command(*run(OUT, "--seed", "3"))
    assert (refused.returncode, errors == []) == (2, not errors)
    assert "seed: 0 there, 3 now" in refused.stderr
    again = command(*run(OUT, "--seed", "3", "--overwrite"))
    assert again.returncode == 0, again.stderr
    found = server.files("bucket/captions")
    old = {name.split("/", 1)[1]: data for name, data in found.items() if name.startswith("_old-")}
    assert rows_of(old) == before
    assert len(rows_of(found)) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [("read-only", "was denied"), ("bucket", "there is no bucket"), ("down", "does not answer")],
)
def test_a_store_that_cannot_be_written_is_one_line_before_weights(
    here: Path, server: S3Server, fault: str, message: str
) -> None:
    server.is_read_only = fault == "read-only"
    if fault == "bucket":
        server.buckets.clear()
    server.refusals = 10**6 if fault == "down" else 0
    more = ["--store-retry-seconds", "0"]
    done = captionjob(*run(OUT, *more), cwd=here, extra=server.environment())
    assert done.returncode == (1 if fault == "down" else 2)
    assert done.stderr.splitlines()[-1].startswith("captionjob: error: s3://bucket/captions")
    assert message in done.stderr
    assert "loading" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_goes_down_ends_the_job_and_a_rerun_completes(
    here: Path, server: S3Server
) -> None:
    extra = server.environment()
    slow = [*run(OUT)[:-1], "scripted:latency=0.01", "--commit-rows", "5"]
    process = start([*slow, "--store-retry-seconds", "1"], here, extra)
    wait_for_pieces(server)
    server.refusals = 10**6
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "all that was committed stays" in errors.splitlines()[-1]
    server.refusals = 0
    again = captionjob(*slow, cwd=here, extra=extra)
    assert again.returncode == 0, again.stderr
    assert "rows kept" in again.stderr
    assert sum(map(len, rows_of(server.files("bucket/captions")).values())) == 2 * SAMPLES + 2


def test_a_signal_in_an_outage_ends_with_75_in_the_grace(here: Path, server: S3Server) -> None:
    slow = [*run(OUT)[:-1], "scripted:latency=0.01", "--commit-rows", "5", "--grace-seconds", "3"]
    process = start(slow, here, server.environment())
    wait_for_pieces(server)
    server.refusals = 10**6
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert time.monotonic() - began < 3.5
    assert "stopped by signal SIGTERM: s3://bucket/captions does not answer" in errors


def wait_for_pieces(server: S3Server) -> None:
    deadline = time.monotonic() + 30
    while not server.files("bucket/captions/_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_jobs_end_with_the_files_of_an_untroubled_run(tmp_path: Path) -> None:
    tally = torture(tmp_path / "torture", 2, 5, is_on_s3=True)
    assert tally.kills >= 2
    assert tally.rows > 0
    assert not tally.faults
