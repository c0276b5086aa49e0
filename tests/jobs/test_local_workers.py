"""Several processes on one machine: one job, one display, one summary, one exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jobs.local_workers import num_gpus, num_workers, own_words
from jobs.sharing import num_cores
from jobs.worker_pipe import Report, total
from pipeline.errors import RequestError
from pipeline.fixtures import make_photo_shard
from pipeline.throughput import Snapshot
from tests.commands import captionjob, start

RUN = ("run", "--shards", "shards", "--out", "out", "--workers", "2", "--commit-rows", "2")
SLOW = (*RUN, "--model", "scripted:latency=0.1", "--slots", "1", "--prefill-batch", "1")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    for place in range(5):
        make_photo_shard(tmp_path / "shards" / f"{place}.tar", 12, seed=place)
    return tmp_path


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a parent started."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()]


def wait_for_rows(here: Path) -> None:
    while len(list(here.glob("out/_progress/*/*.parquet"))) < 2:
        time.sleep(0.05)


def check_whole(here: Path) -> None:
    done = captionjob("verify", "out", "--shards", "shards", cwd=here)
    assert done.returncode == 0, done.stdout
    assert not list(here.glob("out/_claims/*"))


def test_two_workers_make_the_files_of_one(here: Path) -> None:
    alone = captionjob(*RUN, "--workers", "1", "--model", "scripted", cwd=here)
    wanted = {path.name: path.read_bytes() for path in here.glob("out/*.parquet")}
    assert alone.returncode == 0
    assert len(wanted) == 5
    two = captionjob(*RUN, "--model", "scripted", "--overwrite", cwd=here)
    assert two.returncode == 0, two.stderr
    assert {path.name: path.read_bytes() for path in here.glob("out/*.parquet")} == wanted
    assert "2 workers on this machine" in two.stderr
    assert "60 images captioned" in two.stdout
    again = captionjob(*RUN, "--model", "scripted", cwd=here)
    assert again.returncode == 0
    assert "0 images captioned" in again.stdout
    assert "loading" not in again.stderr


def test_a_worker_that_dies_is_started_again(here: Path) -> None:
    process = start(SLOW, here)
    wait_for_rows(here)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "died (signal 9): starting it again" in err
    assert "files)" in out
    check_whole(here)


def test_a_stop_is_passed_on_and_the_exit_code_is_that_of_the_workers(here: Path) -> None:
    process = start(SLOW, here)
    wait_for_rows(here)
    workers = workers_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "start me again" in out
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert captionjob(*RUN, "--model", "scripted", cwd=here).returncode == 0
    check_whole(here)


def test_workers_whose_parent_is_gone_stop_by_themselves(here: Path) -> None:
    process = start(SLOW, here)
    wait_for_rows(here)
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.1)
    held = [path for path in here.glob("out/_claims/*") if path.suffix not in (".done", ".free")]
    assert not held, "they ended in order, and gave their leases back"


def test_a_damaged_shard_makes_the_exit_code_one(here: Path) -> None:
    path = here / "shards" / "0.tar"
    path.write_bytes(path.read_bytes()[:9000])
    done = captionjob(*RUN, "--model", "scripted", cwd=here)
    assert done.returncode == 1
    assert "1 shard failed" in done.stdout
    assert done.stdout.count("0.tar") + done.stdout.count("0-") == 1, "tried by one worker alone"


def test_a_wrong_request_is_refused_before_anything_starts(here: Path) -> None:
    done = captionjob(*RUN, "--model", "./nowhere", cwd=here)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    done = captionjob(*RUN, "--model", "scripted", "--limit", "5", cwd=here)
    assert done.returncode == 2
    assert "--limit" in done.stderr
    assert not (here / "out").exists()


def test_error_rows_are_retried_by_several_workers(here: Path) -> None:
    run = (*RUN, "--model", "scripted:fail=3")
    assert captionjob(*run, cwd=here).returncode == 0
    done = captionjob(*run, "--retry-failed", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "5 images captioned" in done.stdout


def test_words_of_the_parent_are_kept_from_the_workers() -> None:
    words = ["--workers", "4", "--out=x", "--rank=1", "--overwrite", "--claim", "--shards", "a"]
    assert own_words(words) == ["--out=x", "--shards", "a"]


@pytest.mark.parametrize("text", ["0", "-1", "two", "2000"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--workers is"):
        num_workers(text, {})


def test_auto_is_a_worker_a_gpu_or_some_cores_each() -> None:
    assert num_workers("auto", {"CUDA_VISIBLE_DEVICES": "0,1,5"}) == 3
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0, 1,-1,2"}) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-c7384736"}) == 2
    assert num_workers("auto", {"CUDA_VISIBLE_DEVICES": ""}) == max(1, num_cores() // 4)
    assert num_workers("7", {}) == 7


def test_auto_heeds_the_device_that_was_asked_for() -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert num_workers("auto", gpus, "cuda") == 8
    assert num_workers("auto", gpus, "cuda:1") == 1
    assert num_workers("auto", gpus, "cpu") == max(1, num_cores() // 4)


def test_numbers_of_workers_add_up_and_lines_cut_by_a_death_say_nothing() -> None:
    report = Report()
    for line in (b'{"worker": "w"}\n', b'{"standing": {"num_im', b"", b"[]\n", b'{"say": "x"}\n'):
        report.hear(line)
    assert (report.worker, report.standing, report.said) == ("w", None, ["x"])
    one = Snapshot(seconds=4, images=10, waiting_seconds=2, resumed_rows=7)
    both = total([one, one], seconds=5)
    assert (both.seconds, both.images, both.resumed_rows) == (5, 20, 7)
    assert both.share(both.waiting_seconds) == pytest.approx(2 / 5)
