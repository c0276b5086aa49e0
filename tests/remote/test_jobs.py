"""The real commands over shards in stores: the rows are a local run's, and no secret is told."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config import RunConfig
from jobs.run import Run
from pipeline.fixtures import make_image_bytes, make_photo_shard
from pipeline.output.store import CommitSettings
from tests.commands import captionjob
from tests.remote.conftest import HASTE
from tests.remote.fault_server import Fault, Store

pytest.importorskip("boto3")

COUNTS = (30, 5, 12)
SECRET = "s3cr3t-signature"


@pytest.fixture
def shards(tmp_path: Path, store: Store) -> Path:
    """Shards on the disk, and the same in the store."""
    for place, count in enumerate(COUNTS):
        path = tmp_path / f"shards/{place}.tar"
        path.parent.mkdir(exist_ok=True)
        make_photo_shard(path, count, seed=place)
        store.objects[f"/bucket/{place}.tar"] = path.read_bytes()
    return path.parent


def config_of(out: Path, *shards: str) -> RunConfig:
    return RunConfig(shards=shards, out=out, model="scripted", commit=CommitSettings(rows=7))


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Return all rows under final names in the order of their shards, but for the shards' ids."""
    rows = [
        row
        for path in sorted(out.glob("*.parquet"))
        for row in pq.read_table(path, partitioning=None).to_pylist()
    ]
    return [{**row, "shard": row["shard"].rpartition("-")[0]} for row in rows]


@pytest.fixture
def wanted(shards: Path, tmp_path: Path) -> list[dict[str, Any]]:
    assert Run(config_of(tmp_path / "local", str(shards))).run().exit_code == 0
    return rows_of(tmp_path / "local")


@pytest.mark.parametrize("pattern", ["s3://bucket/", "http"])
@pytest.mark.usefixtures("shards", "account")
def test_rows_from_a_store_are_those_of_a_local_run_whatever_breaks_on_the_way(
    pattern: str, store: Store, tmp_path: Path, wanted: list[dict[str, Any]]
) -> None:
    pattern = f"{store.url}/bucket/{{0..2}}.tar" if pattern == "http" else pattern
    hurt = [Fault("cut", 9000), Fault("stall", 3000), Fault("status"), None, Fault("reset", 20_000)]
    store.schedule = [*hurt, None, *hurt, None, *hurt]
    result = Run(config_of(tmp_path / "out", pattern)).run()
    assert (result.exit_code, result.failed) == (0, {})
    assert not store.schedule
    assert rows_of(tmp_path / "out") == wanted


def test_a_shard_that_is_given_up_is_named_and_a_rerun_goes_on_from_its_rows(
    shards: Path, store: Store, tmp_path: Path, wanted: list[dict[str, Any]]
) -> None:
    assert shards
    half = len(store.objects["/bucket/0.tar"]) // 2
    config = config_of(tmp_path / "out", f"{store.url}/bucket/{{0..2}}.tar")
    # The looks at three shards, a look and both ends of the first, a look, and then the shard.
    store.schedule = [None] * 7 + [Fault("cut", half)] + [Fault("cut", 0)] * 3
    result = Run(config).run()
    assert result.exit_code == 1
    ((shard_id, why),) = result.failed.items()
    assert shard_id.startswith("0-")
    assert "attempt 4 of 4" in why
    assert f"at byte {half} of" in why
    again = Run(config).run()
    assert again.exit_code == 0
    assert 0 < again.snapshot.images < COUNTS[0]
    assert rows_of(tmp_path / "out") == wanted


def test_a_shard_that_changed_between_runs_is_made_anew_and_no_other(
    shards: Path, store: Store, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "out", f"{store.url}/bucket/{{0..2}}.tar")
    assert Run(config).run().snapshot.images == sum(COUNTS)
    assert Run(config).run().snapshot.images == 0
    make_photo_shard(shards / "1.tar", 9, seed=77)
    store.objects["/bucket/1.tar"] = (shards / "1.tar").read_bytes()
    again = Run(config).run()
    assert (again.exit_code, again.snapshot.images) == (0, 9)
    assert len(rows_of(tmp_path / "out")) == COUNTS[0] + 9 + COUNTS[2]


def test_a_shard_that_changes_under_the_reader_is_an_error_and_a_rerun_mends_it(
    shards: Path, store: Store, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "out", f"{store.url}/bucket/{{0..2}}.tar")
    store.schedule = [None] * 7 + [Fault("cut", 20_000), Fault("replace")]
    result = Run(config).run()
    assert "the object changed while it was read" in next(iter(result.failed.values()))
    store.objects["/bucket/0.tar"] = (shards / "0.tar").read_bytes()
    assert Run(config).run().exit_code == 0
    assert len(rows_of(tmp_path / "out")) == sum(COUNTS)


def texts_of(folder: Path) -> str:
    return "\n".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*.*"))


@pytest.mark.usefixtures("shards")
def test_no_command_tells_a_signature_or_a_password(store: Store, tmp_path: Path) -> None:
    query = f"X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}"
    pattern = f"{store.url.replace('//', f'//me:{SECRET}@')}/bucket/{{0..2}}.tar?{query}"
    missing = pattern.replace("{0..2}", "{0..9}")
    made = ["--out", "out"]
    asked = ["--shards", pattern]
    commands = [
        (0, ["run", *asked, *made, "--model", "scripted", "--dry-run"]),
        (2, ["run", "--shards", missing, *made, "--model", "scripted"]),
        (1, ["run", *asked, *made, "--model", "scripted", "--commit-rows", "5"]),
        (0, ["status", "out", *asked]),
        (0, ["run", *asked, *made, "--model", "scripted", "--max-error-rate", "1"]),
        (0, ["status", "out", *asked]),
        (0, ["verify", "out", *asked]),
        (0, ["inspect", *asked]),
        (0, ["inspect", *asked, "--json"]),
        (0, ["export", "out", "made.jsonl", "--to", "jsonl", *asked]),
        (0, ["export", "out", "tars", "--to", "webdataset", "--replace", *asked]),
        (0, ["compare", "out", "out", "--to", "pair.html", *asked]),
        (0, ["report", "out", *asked]),
    ]
    said = ""
    for place, (code, words) in enumerate(commands):
        if place == 2:  # the third shard breaks off each time
            store.broken["/bucket/2.tar"] = 5000
        done = captionjob(*words, cwd=tmp_path, extra={**HASTE, "NO_PROXY": "*"})
        store.broken.clear()
        assert done.returncode == code, (words[0], done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        said += done.stdout + done.stderr
    assert f"{store.url}/bucket/0.tar" in said
    assert SECRET in "\n".join(store.asked)
    shutil.rmtree(tmp_path / "shards")
    everything = said + texts_of(tmp_path)
    assert len([*tmp_path.glob("tars/*.tar")]) == 3
    assert SECRET not in everything
    assert "AKIA" not in everything


@pytest.mark.usefixtures("shards", "account")
def test_a_wrong_secret_is_one_line_before_anything_is_loaded(store: Store, tmp_path: Path) -> None:
    store.password = "not what was signed"
    words = ["run", "--shards", "s3://bucket/{0..2}.tar", "--out", "out", "--model", "scripted"]
    done = captionjob(*words, cwd=tmp_path, extra={**HASTE, "NO_PROXY": "*"})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "401" in done.stderr
    assert "s3cr3t-of-somebody" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("shards")
def test_rows_made_from_a_disk_are_joined_with_the_shards_in_a_store(
    store: Store, tmp_path: Path
) -> None:
    """A shard that moved has another id; its size and the hash of its ends tell that it is it."""
    local = Run(config_of(tmp_path / "out", str(tmp_path / "shards"))).run()
    assert local.exit_code == 0
    url = f"{store.url}/bucket/{{0..2}}.tar"
    done = captionjob(
        *("verify", "out", "--shards", url, "--json"),
        cwd=tmp_path,
        extra={**HASTE, "NO_PROXY": "*"},
    )
    assert json.loads(done.stdout)["problems"] == []
    assert done.returncode == 0


@pytest.mark.parametrize("pattern", ["s3://bucket/tables/", "http"])
@pytest.mark.usefixtures("account")
def test_parquet_in_a_store_is_read_from_its_end_whatever_breaks_on_the_way(
    pattern: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "tables").mkdir()
    for place, count in enumerate(COUNTS):
        path = tmp_path / f"tables/{place}.parquet"
        rows = {
            "image": [{"bytes": make_image_bytes(seed=i), "path": None} for i in range(count)],
            "n": list(range(count)),
        }
        pq.write_table(pa.table(rows), path, row_group_size=7)
        store.objects[f"/bucket/tables/{place}.parquet"] = path.read_bytes()
    wanted = config_of(tmp_path / "local", str(tmp_path / "tables"))
    assert Run(wanted).run().exit_code == 0
    if pattern == "http":
        pattern = f"{store.url}/bucket/tables/{{0..2}}.parquet"
    # Three faults in all: so small files never bring enough for failures to be forgiven.
    store.schedule = [
        None,
        Fault("cut", 900),
        None,
        None,
        Fault("stall", 300),
        None,
        Fault("reset"),
    ]
    result = Run(config_of(tmp_path / "out", pattern)).run()
    assert (result.exit_code, result.failed) == (0, {})
    assert not store.schedule
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "local")


@pytest.mark.parametrize("kind", ["parquet", "tar.gz"])
@pytest.mark.usefixtures("shards")
def test_other_kinds_of_shards_are_read_from_a_store_as_from_a_disk(
    kind: str, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / f"other.{kind}"
    if kind == "parquet":
        pictures = [{"bytes": make_image_bytes(seed=i), "path": f"{i}.jpg"} for i in range(40)]
        pq.write_table(pa.table({"image": pictures, "n": range(40)}), path, row_group_size=7)
    else:
        path.write_bytes(gzip.compress((tmp_path / "shards/0.tar").read_bytes()))
    store.objects[f"/{path.name}"] = path.read_bytes()
    store.schedule = [None, Fault("cut", 5000), None, Fault("cut", 9000), None, Fault("cut", 100)]
    assert Run(config_of(tmp_path / "disk", str(path))).run().exit_code == 0
    assert Run(config_of(tmp_path / "out", f"{store.url}/{path.name}")).run().exit_code == 0
    assert not store.schedule
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "disk")
    assert len(rows_of(tmp_path / "out")) in (40, COUNTS[0])
