"""A job over a folder of pictures: the same rows, laws, resuming and commands as over tars."""

from __future__ import annotations

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.config import LimitSettings, RunConfig, WorkerSettings
from jobs.ranks import Place
from jobs.run import Run
from jobs.verify import verify_output
from jobs.verify_view import SampleRequest, print_verification
from pipeline.fixtures import make_image_bytes, make_shard
from pipeline.input import pictures
from pipeline.output.store import CommitSettings
from tests.commands import captionjob

NUM_PICTURES = 40


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A job over forty pictures in two folders, in small parts."""
    for name, value in {"MIN_PART": 6, "MAX_PART": 14, "ODDS": 5}.items():
        monkeypatch.setattr(pictures, name, value)
    for number in range(NUM_PICTURES):
        folder = tmp_path / "photos" / ("a" if number < 25 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        data = make_image_bytes(seed=number)
        broken = data[: len(data) // 2] if number == 5 else data
        (folder / f"{number:02d}.jpg").write_bytes(broken)
        (folder / f"{number:02d}.json").write_text(json.dumps({"n": number}))
    return RunConfig(
        shards=(str(tmp_path / "photos"),),
        out=tmp_path / "out",
        model="scripted:shuffle=5",
        prompt="Describe {json.n}.",
        keep=("json.n",),
        commit=CommitSettings(rows=3),
    )


def out_of(config: RunConfig) -> Path:
    return Path(config.out)


def rows_of(config: RunConfig, *without: str) -> list[dict[str, Any]]:
    """Return all rows, in the order of their members."""
    rows = [
        row
        for path in out_of(config).glob("*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    rows.sort(key=lambda row: row["member"])
    return [{name: row[name] for name in row if name not in without} for row in rows]


def problems(config: RunConfig) -> object:
    return verify_output(config.out, list(config.shards)).problems


def test_the_rows_are_those_of_the_same_pictures_in_a_tar(config: RunConfig) -> None:
    assert Run(config).run().exit_code == 0
    folder = out_of(config).parent
    members: list[tuple[str | tarfile.TarInfo, bytes]] = [
        (path.relative_to(folder / "photos").as_posix(), path.read_bytes())
        for path in sorted((folder / "photos").rglob("*.*"))
    ]
    tar = make_shard(folder / "all.tar", members)
    packed = replace(config, shards=(tar,), out=folder / "of-tar")
    assert Run(packed).run().exit_code == 0
    assert rows_of(config, "shard", "index") == rows_of(packed, "shard", "index")
    assert [row["error"] for row in rows_of(config)][4:7] == [None, "truncated", None]
    assert len(list(out_of(config).glob("*.parquet"))) > 2


def test_a_job_that_was_cut_goes_on_without_opening_what_is_committed(config: RunConfig) -> None:
    cut = replace(config, limits=LimitSettings(samples=11))
    assert Run(cut).run().limit == 11
    result = Run(config).run()
    assert (result.exit_code, result.snapshot.resumed_rows) == (0, 11)
    whole = replace(config, out=out_of(config).parent / "whole")
    Run(whole).run()
    assert rows_of(config) == rows_of(whole)


@pytest.mark.parametrize("world_size", [2, 20])
def test_each_picture_has_one_worker(config: RunConfig, world_size: int) -> None:
    for rank in range(world_size):
        worker = WorkerSettings(Place(rank, world_size), 1)
        assert Run(replace(config, worker=worker)).run().exit_code == 0
    whole = replace(config, out=out_of(config).parent / "whole")
    Run(whole).run()
    assert rows_of(config) == rows_of(whole)


def test_after_each_change_of_the_folder_there_is_one_row_a_picture(config: RunConfig) -> None:
    """Parts that end where none ended before leave no rows of theirs behind."""
    photos = out_of(config).parent / "photos"
    captioned = []
    for change in range(12):
        result = Run(config).run()
        captioned.append(result.snapshot.images)
        assert result.exit_code == 0
        assert problems(config) == ()
        found = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
        assert [row["member"] for row in rows_of(config)] == found
        if change % 3 == 0:
            new = photos / "a" / f"{change}x.jpg"
            new.write_bytes(make_image_bytes(seed=1000 + change))
            new.with_suffix(".json").write_text('{"n": 0}')
        elif change % 3 == 1:
            (photos / found[change * 3]).unlink()
        else:
            (photos / found[change]).write_bytes(make_image_bytes(seed=2000 + change))
    assert captioned[0] == NUM_PICTURES
    assert max(captioned[1:]) < NUM_PICTURES


def test_a_picture_that_changes_while_it_is_captioned_is_captioned_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = out_of(config).parent / "photos"
    original = pictures._read

    def changes(*words: Any) -> Any:
        found = original(*words)
        if words[1] == "b/30.jpg":
            (photos / words[1]).write_bytes(make_image_bytes(seed=77))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "_read", changes)
        result = Run(config).run()
    assert result.exit_code == 1
    assert "changed while it was read" in str(result.failed)
    assert Run(config).run().exit_code == 0
    assert problems(config) == ()


def test_result_commands_read_the_folder(
    config: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MIN_PART", 500)  # as it is in the commands' own processes
    monkeypatch.setattr(pictures, "MAX_PART", 2000)
    small = replace(config, shards=(str(out_of(config).parent / "photos" / "b"),))
    Run(small).run()
    folder = out_of(config).parent
    sample = SampleRequest(5, 0, None, "cpu", False)
    shards = list(small.shards)
    assert print_verification(small.out, shards, sample, sys.stdout, as_json=False) == 0
    assert "5 exactly the same" in capsys.readouterr().out
    for words in (
        ("report", "out", "--shards", "photos/b", "--to", "report.html"),
        ("export", "out", "txt", "--to", "txt", "--shards", "photos/b"),
        ("export", "out", "wds", "--to", "webdataset", "--shards", "photos/b"),
        ("status", "out", "--shards", "photos/b", "--json"),
        ("compare", "out", "out", "--shards", "photos/b", "--references", "json.n"),
        ("inspect", "--shards", "photos/b"),
    ):
        done = captionjob(*words, cwd=folder)
        assert done.returncode == 0, (words, done.stderr)
    assert len(list((folder / "txt").glob("*.jpg"))) == 15
    with tarfile.open(next((folder / "wds").glob("b-*"))) as tar:
        assert {"25.jpg", "25.json", "25.txt", "25.captionjob.json"} <= set(tar.getnames())


def test_what_lies_beside_shards_is_said(config: RunConfig) -> None:
    folder = out_of(config).parent / "photos" / "a"
    make_shard(folder / "x.tar", [("x.jpg", make_image_bytes())])
    done = captionjob(
        *("run", "--shards", "photos/a", "--out", "mixed", "--model", "scripted"),
        cwd=out_of(config).parent,
    )
    assert done.returncode == 0
    assert "photos/a has tars; 25 pictures beside them are left aside" in done.stderr
