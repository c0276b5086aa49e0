"""Ray's actors and driver without Ray; the real one is in `scripts/cluster-test --only ray`."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.config import LimitSettings, RunConfig
from jobs.display import Standing
from jobs.launch.ray_actor import ShareDone, ShareMaker
from jobs.launch.ray_board import Board, num_shares
from jobs.launch.ray_driver import _last_words as last_words
from pipeline.captioner import SpeedSettings
from pipeline.errors import JobError, RequestError
from pipeline.fixtures import make_photo_shard
from pipeline.input.shards import expand_shards
from pipeline.output.store import CommitSettings
from pipeline.records import Shard
from pipeline.throughput import Snapshot
from tests.commands import captionjob


def config(here: Path, model: str = "scripted") -> RunConfig:
    return RunConfig(
        shards=(str(here / "shards"),),
        out=here / "out",
        model=model,
        speed=SpeedSettings(slots=4),
        commit=CommitSettings(rows=5, seconds=0.2),
        limits=LimitSettings(grace_seconds=2),
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    for number in range(6):
        make_photo_shard(tmp_path / "shards" / f"{number}.tar", 5, seed=10 * number)
    return tmp_path


def maker(here: Path, number: int = 0, shares: int = 3, model: str = "scripted") -> ShareMaker:
    one = config(here, model)
    return ShareMaker(one, number, shares)


def all_of(here: Path) -> list[Shard]:
    return expand_shards(config(here).shards)


def finished(here: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in here.glob("out/*.parquet"))


def drive(makers: list[ShareMaker], board: Board, here: Path) -> None:
    while board.waiting:
        for number, one in enumerate(makers):
            if board.waiting:
                share = board.give(number)
                board.settle(share, one.make(share, all_of(here)))


def test_all_shares_together_are_the_whole_job(here: Path) -> None:
    board = Board(num_shares=3, max_losses=0)
    drive([maker(here, 0), maker(here, 1)], board, here)
    assert board.is_over
    assert finished(here) == 30
    shards = expand_shards(config(here).shards)
    result = board.result(config(here).folder(), shards, "", board.snapshot(2.0, 2))
    assert result is not None
    assert (result.exit_code, result.after.num_done, result.before.num_done) == (0, 6, 0)
    assert result.snapshot.images == 30
    assert result.snapshot.images_per_second == 15.0


def test_an_actor_loads_the_network_once_and_has_one_throughput_file(here: Path) -> None:
    one = maker(here, model="scripted:load=0.3")
    one.make(0, all_of(here))
    began = time.monotonic()
    done = [one.make(1, all_of(here)), one.make(2, all_of(here))]
    assert time.monotonic() - began < 0.6
    (path,) = here.glob("out/_throughput/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    images = [line["images"] for line in lines if line["event"] == "end"]
    assert images == [10, 20, 30]  # they go on from share to share
    tokens = [line["new_tokens"] for line in lines]
    assert tokens == sorted(tokens)
    assert [one.snapshot.images for one in done] == [10, 10]  # and each share tells its own


def test_a_share_made_twice_leaves_each_row_once(here: Path) -> None:
    first, second = maker(here, 0), maker(here, 1)
    first.make(0, all_of(here))
    again = second.make(0, all_of(here))
    assert again.snapshot.images == 0
    assert again.before.num_done == again.after.num_done == 2
    assert finished(here) == 10


def test_an_actor_that_is_told_to_stop_commits_what_is_finished(here: Path) -> None:
    one = maker(here, shares=1, model="scripted:latency=0.05")
    done: list[ShareDone] = []
    thread = threading.Thread(target=lambda: done.append(one.make(0, all_of(here))))
    thread.start()
    while (standing := one.standing()) is None or standing.snapshot.images < 8:
        time.sleep(0.01)
    one.stop("a test")
    thread.join(20)
    assert done[0].stopped == "a test"
    made = done[0].snapshot.images
    assert 8 <= made < 30
    rest = maker(here, 1, shares=1).make(0, all_of(here))
    assert rest.before.num_rows == made
    assert (rest.snapshot.images, finished(here)) == (30 - made, 30)


def test_a_wrong_request_is_told_by_the_actor_in_a_line(here: Path) -> None:
    maker(here).make(0, all_of(here))
    with pytest.raises(RequestError, match="made with other settings"):
        maker(here, model="scripted:fail=x").make(1, all_of(here))


def test_the_share_of_a_dead_actor_is_the_next_one(here: Path) -> None:
    board = Board(num_shares=3, max_losses=1)
    assert [board.give(0), board.give(1)] == [0, 1]
    board.standings[0] = Standing(4, 10, Snapshot(images=4))
    assert board.lose(0) == 0
    assert not board.is_over
    assert board.give(1) == 0
    assert board.snapshot(1.0, 2).images == 4  # what it did is not forgotten
    with pytest.raises(JobError, match=r"share 0 of 3 ended its actor 2 times"):
        board.lose(0)


def test_the_total_is_told_from_the_shares_that_are_known(here: Path) -> None:
    board = Board(num_shares=3, max_losses=0)
    assert board.standing(1.0, 1).num_total is None
    one = maker(here)
    board.give(0)
    board.settle(0, one.make(0, all_of(here)))
    board.give(0)
    board.standings[1] = Standing(3, 10, Snapshot(images=3))
    standing = board.standing(2.0, 1)
    assert (standing.num_images, standing.num_total) == (13, 30)


@pytest.mark.parametrize(
    ("shards", "actors", "wanted"), [(1000, 4, 32), (10, 4, 10), (2, 4, 4), (1, 1, 1)]
)
def test_shares_are_few_where_a_shard_would_be_cut_for_them(
    shards: int, actors: int, wanted: int
) -> None:
    assert num_shares(shards, actors) == wanted


def test_of_a_trace_the_line_that_names_the_error_is_told() -> None:
    trace = """The actor died because of an error raised in its creation task
      File "x.py", line 4, in __init__
    ModuleNotFoundError: No module named 'jobs'
    """
    assert last_words(trace) == "ModuleNotFoundError: No module named 'jobs'"
    assert last_words("The node died.\n class_name: X") == "The node died."


def test_relative_paths_are_refused(here: Path) -> None:
    words = ("launch", "ray", "--", "--shards", "shards", "--out", str(here / "out"))
    done = captionjob(*words, cwd=here)
    assert done.returncode == 2
    assert "--shards 'shards' is relative, and names another place in Ray's nodes" in done.stderr


@pytest.mark.parametrize("option", ["--claim", "--workers=2"])
def test_what_would_deal_out_shards_too_is_refused(here: Path, option: str) -> None:
    words = ("launch", "ray", "--", "--shards", str(here / "shards"), "--out", str(here / "out"))
    done = captionjob(*words, option, cwd=here)
    assert done.returncode == 2
    assert f"{option.partition('=')[0]} does not go with this" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_a_missing_package_is_named(here: Path) -> None:
    words = ("launch", "ray", "--", "--shards", str(here / "shards"), "--out", str(here / "out"))
    done = captionjob(*words, cwd=here)
    assert done.returncode == 2
    assert done.stderr.endswith("needs the ray package: pip install 'captionjob[ray]'\n")
