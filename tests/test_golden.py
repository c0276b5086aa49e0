"""The example shards, captioned by the real command with the embedded model, as a newcomer does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from tests.commands import REPOSITORY, captionjob

EXAMPLES = str(REPOSITORY / "scripts" / "examples" / "photos-*.tar")
GOLDEN = json.loads((REPOSITORY / "tests" / "data" / "golden_captions.json").read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    here = tmp_path_factory.mktemp("golden")
    options = ("--keep", "json.title", "--slots", "8", "--prefill-batch", "5")
    done = captionjob("run", "--shards", EXAMPLES, "--out", "captions", *options, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "2 rows of these are errors: 1 truncated, 1 unreadable" in done.stdout
    return read_rows(here / "captions")


def read_rows(out: Path) -> list[dict[str, object]]:
    return [
        row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def test_each_example_has_its_caption(rows: list[dict[str, object]]) -> None:
    found = {row["member"]: row["caption"] or f"error: {row['error']}" for row in rows}
    assert found == GOLDEN


def test_rows_are_the_image_members_in_shard_order(rows: list[dict[str, object]]) -> None:
    samples = [s for shard in expand_shards([EXAMPLES]) for s in read_shard(shard)]
    assert [(row["shard"], row["index"], row["key"], row["member"]) for row in rows] == [
        (s.ref.shard, s.ref.index, s.ref.key, s.ref.member) for s in samples
    ]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(s.data).hexdigest() for s in samples]


def test_rows_say_how_their_captions_came_about(rows: list[dict[str, object]]) -> None:
    for row in rows:
        if row["status"] == "error":
            assert row["caption"] is None
            continue
        assert row["finish_reason"] == "eos"
        assert row["status"] == "ok"
        assert str(row["caption"]).startswith(("a photo of ", "a black-and-white photo of "))
        assert 3 <= int(str(row["num_caption_tokens"])) <= 30
        assert -3 < float(str(row["mean_logprob"])) <= 0
        assert row["json.title"]


def test_people_are_seen_and_not_imagined(rows: list[dict[str, object]]) -> None:
    said = {str(row["member"]): str(row["caption"]) for row in rows}
    people = {"astronaut.jpg", "grace-hopper.jpg", "cameraman.png"}
    assert {member for member, caption in said.items() if "person" in caption} == people
