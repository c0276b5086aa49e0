"""A job over Parquet files: the same rows, laws, resuming and commands as over tars."""

from __future__ import annotations

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config import LimitSettings, RunConfig
from jobs.results import read_output
from jobs.run import Run
from jobs.verify import verify_output
from jobs.verify_view import SampleRequest, print_verification
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.output.store import CommitSettings
from pipeline.records import Columns
from tests.commands import captionjob

COUNTS = (9, 0, 14)
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def picture(shard: int, row: int) -> bytes | None:
    """Return a picture, a broken one, or none at all."""
    if row == 3:
        return None
    data = make_image_bytes(seed=100 * shard + row)
    return data[: len(data) // 2] if row == 5 else data


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A job over three Parquet files, and the same pictures in tars beside them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "tars").mkdir()
    for shard, count in enumerate(COUNTS):
        rows = [picture(shard, row) for row in range(count)]
        names = [f"{shard}-{row:02d}" for row in range(count)]
        made = pa.table(
            {
                "image": pa.array([{"bytes": one, "path": None} for one in rows], IMAGE),
                "name": pa.array(names, pa.string()),
                "n": pa.array(range(count), pa.int32()),
            }
        )
        pq.write_table(made, tmp_path / "data" / f"train-{shard}.parquet", row_group_size=4)
        members: list[tuple[str | tarfile.TarInfo, bytes]] = []
        for name, data, n in zip(names, rows, range(count), strict=True):
            members += [
                (f"{name}.jpg", data or b""),
                (f"{name}.json", json.dumps({"n": n}).encode()),
            ]
        (tmp_path / "tars" / f"train-{shard}.tar").write_bytes(make_tar_bytes(members))
    return RunConfig(
        shards=(str(tmp_path / "data" / "train-*.parquet"),),
        out=tmp_path / "out",
        model="scripted:shuffle=5",
        prompt="Describe {json.n}.",
        keep=("json.n",),
        columns=Columns(key="name"),
        commit=CommitSettings(rows=3),
    )


def rows_of(out: Path, *without: str) -> list[dict[str, Any]]:
    rows = [
        row
        for path in sorted(out.glob("*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    return [{name: row[name] for name in row if name not in without} for row in rows]


def shards_of(config: RunConfig) -> list[str]:
    return list(config.shards)


def test_the_rows_are_those_of_the_same_pictures_in_tars(config: RunConfig) -> None:
    assert Run(config).run().exit_code == 0
    tars = replace(
        config,
        shards=(str(config.out.parent / "tars"),),
        out=config.out.parent / "of-tars",
        columns=Columns(),
    )
    assert Run(tars).run().exit_code == 0
    differing = ("shard", "member", "error_detail")
    assert rows_of(config.out, *differing) == rows_of(tars.out, *differing)
    assert [(row["key"], row["error"]) for row in rows_of(config.out)][3:6] == [
        ("0-03", "empty"),
        ("0-04", None),
        ("0-05", "truncated"),
    ]


def test_a_job_that_was_cut_goes_on_without_reading_what_is_committed(config: RunConfig) -> None:
    cut = replace(config, limits=LimitSettings(samples=15))
    assert Run(cut).run().limit == 15
    result = Run(config).run()
    assert result.exit_code == 0
    assert result.snapshot.resumed_rows == 15
    whole = replace(config, out=config.out.parent / "whole")
    Run(whole).run()
    assert rows_of(config.out) == rows_of(whole.out)


def test_a_damaged_file_costs_its_own_rows_and_is_read_again_when_it_is_whole(
    config: RunConfig,
) -> None:
    path = config.out.parent / "data" / "train-0.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    result = Run(config).run()
    assert result.exit_code == 1
    assert "no Parquet footer" in next(iter(result.failed.values()))
    assert len(rows_of(config.out)) == sum(COUNTS[1:])
    path.write_bytes(whole)
    assert Run(config).run().exit_code == 0
    assert verify_output(config.out, shards_of(config)).problems == ()


def test_a_file_that_was_changed_is_captioned_again(config: RunConfig) -> None:
    Run(config).run()
    path = config.out.parent / "data" / "train-0.parquet"
    pq.write_table(pq.read_table(path).slice(0, 2), path)
    assert Run(config).run().exit_code == 0
    assert len(rows_of(config.out)) == 2 + sum(COUNTS[1:])
    assert verify_output(config.out, shards_of(config)).problems == ()


def test_another_column_is_another_job(config: RunConfig) -> None:
    Run(config).run()
    done = captionjob(
        *("run", "--shards", config.shards[0], "--out", str(config.out), "--keep", "json.n"),
        *("--model", config.model, "--prompt", "Describe {json.n}."),
        cwd=config.out.parent,
    )
    assert done.returncode == 2
    assert 'key_column: "name" there, nothing now' in done.stderr


def test_result_commands_read_the_columns_that_the_job_was_given(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(config).run()
    out, folder = str(config.out), config.out.parent
    found = verify_output(config.out, shards_of(config))
    assert (found.problems, found.num_images) == ((), sum(COUNTS))
    sample = SampleRequest(5, 0, None, "cpu", False)
    assert print_verification(config.out, shards_of(config), sample, sys.stdout, as_json=False) == 0
    assert "5 exactly the same" in capsys.readouterr().out
    for words in (
        ("report", out, "--shards", config.shards[0], "--to", "report.html"),
        ("export", out, "txt", "--to", "txt", "--shards", config.shards[0]),
        ("export", out, "wds", "--to", "webdataset", "--shards", config.shards[0]),
        ("export", out, "hf", "--to", "hf", "--shards", config.shards[0]),
        ("status", out, "--shards", config.shards[0], "--json"),
        ("compare", out, out, "--shards", config.shards[0], "--references", "json.n"),
        ("inspect", "--shards", config.shards[0], "--key-column", "name"),
    ):
        done = captionjob(*words, cwd=folder)
        assert done.returncode == 0, (words, done.stderr)
    assert len(list((folder / "txt").glob("*.jpg"))) == sum(COUNTS) - 4
    with tarfile.open(next((folder / "wds").glob("train-0*"))) as tar:
        assert {"0-00.jpg", "0-00.json", "0-00.txt", "0-00.captionjob.json"} <= set(tar.getnames())
    again = replace(
        config, shards=(str(folder / "hf" / "data" / "*.parquet"),), out=folder / "again"
    )
    again = replace(
        again, columns=Columns(key="key"), prompt="Describe {key}.", keep=("json.caption",)
    )
    assert Run(again).run().exit_code == 0
    assert all(row["json.caption"] for row in rows_of(again.out))
    assert read_output(again.out).columns == Columns(key="key")


def test_a_moved_file_is_still_known_by_its_bytes(config: RunConfig) -> None:
    Run(config).run()
    moved = config.out.parent / "moved"
    (config.out.parent / "data").rename(moved)
    assert verify_output(config.out, [str(moved / "*.parquet")]).problems == ()


def test_a_command_cannot_write_a_parquet_file(config: RunConfig) -> None:
    """Its footer is read first, and lies at the end."""
    path = config.out.parent / "data" / "train-0.parquet"
    done = captionjob(
        *("inspect", "--allow-pipe", "--shards", f"pipe:cat {path}"), cwd=config.out.parent
    )
    assert done.returncode == 1
    assert "a Parquet file; wanted one whose name ends in .parquet" in done.stdout
