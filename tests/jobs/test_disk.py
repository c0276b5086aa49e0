"""A disk that is full or read-only: one line, nothing committed is lost, a rerun completes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import cli
from pipeline.errors import JobError
from pipeline.fixtures import make_photo_shard
from pipeline.output.folder import open_folder
from pipeline.throughput import Snapshot, ThroughputLog
from tests.commands import captionjob, start

ROOM = 24 << 20  # above the least that a run asks for at its start
SAMPLES = 120


def mount(*arguments: str) -> bool:
    done = subprocess.run(["mount", *arguments], capture_output=True)
    return done.returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own, below `tmp_path`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or not mount("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", folder):
        pytest.skip("a disk can be mounted by root on Linux alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    for number in range(3):
        make_photo_shard(tmp_path / "shards" / f"{number}.tar", SAMPLES, seed=1000 * number)
    return tmp_path


def arguments(out: str, latency: float) -> list[str]:
    model = f"scripted:latency={latency}"
    run = ["run", "--shards", "shards", "--out", out, "--model", model]
    return [*run, "--commit-rows", "5", "--slots", "4"]


def rows_of(out: Path) -> dict[str, list[dict[str, object]]]:
    return {
        path.name: pq.read_table(path, partitioning=None).to_pylist()
        for path in sorted(out.glob("*.parquet"))
    }


def fill(disk: Path) -> Path:
    """Take all room that is left, and go on until there is none."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return path


def test_a_full_disk_is_one_line_and_a_rerun_completes(here: Path, disk: Path) -> None:
    assert captionjob(*arguments("untroubled", 0), cwd=here).returncode == 0
    process = start(arguments("disk/out", 0.01), here)
    deadline = time.monotonic() + 60
    while not list(disk.glob("out/_progress/*/*.parquet")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    filler = fill(disk)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert last.startswith("captionjob: error: ")
    assert "No space left on device" in last
    pieces = [*disk.glob("out/*.parquet"), *disk.glob("out/_progress/*/*.parquet")]
    num_committed = sum(pq.read_metadata(path).num_rows for path in pieces)
    assert num_committed > 0
    filler.unlink()
    again = captionjob(*arguments("disk/out", 0), cwd=here)
    assert again.returncode == 0, again.stderr
    assert f"{num_committed} rows kept" in again.stderr
    assert rows_of(disk / "out") == rows_of(here / "untroubled")
    assert not list(disk.rglob(".tmp-*"))


def test_a_disk_that_is_full_at_the_start_is_a_wrong_request(here: Path, disk: Path) -> None:
    fill(disk)
    done = captionjob(*arguments("disk/out", 0), cwd=here)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "free on that disk" in done.stderr


@pytest.mark.parametrize("has_output", [False, True])
def test_a_read_only_output_is_one_line(here: Path, disk: Path, has_output: bool) -> None:
    if has_output:
        done = captionjob(*arguments("disk/out", 0), "--limit", "150", cwd=here)
        assert done.returncode == 0, done.stderr
    before = sorted(disk.rglob("*"))
    assert mount("-o", "remount,ro", str(disk))
    done = captionjob(*arguments("disk/out", 0), cwd=here)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("captionjob: error: --out 'disk/out'")
    assert "Traceback" not in done.stderr
    assert sorted(disk.rglob("*")) == before
    assert mount("-o", "remount,rw", str(disk))
    done = captionjob(*arguments("disk/out", 0), cwd=here)
    assert done.returncode == 0, done.stderr
    assert sum(map(len, rows_of(disk / "out").values())) == 3 * SAMPLES


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_numbers_that_cannot_be_logged_are_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "_throughput").mkdir()
    (tmp_path / "_throughput" / "w.jsonl").symlink_to("/dev/full")
    log = ThroughputLog(open_folder(tmp_path), "w")
    with pytest.raises(JobError, match=r"w\.jsonl cannot be written: No space left"):
        log.write(Snapshot(), "interval", 0.0)
    log.close()


@pytest.mark.parametrize("number", cli.DISK_ERRORS)
def test_whatever_a_disk_says_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(number, os.strerror(number), "/x/y")

    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"captionjob: error: /x/y: {os.strerror(number)}\n"
