"""The shipped example shards: whole, small, named, and with two error rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import SampleError
from pipeline.images.opening import open_sample
from pipeline.input.reader import ShardStats, read_shard
from pipeline.input.shards import expand_shards
from pipeline.prompts import PromptTemplate, kept_fields
from pipeline.records import Sample

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
BROKEN = {"cut-off": "truncated", "not-found": "unreadable"}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    stats = ShardStats()
    shards = expand_shards([str(EXAMPLES / "photos-{000000..000002}.tar")])
    found = [sample for shard in shards for sample in read_shard(shard, stats=stats)]
    assert stats.junk == {}
    return found


def test_there_are_about_thirty_in_less_than_three_megabytes(samples: list[Sample]) -> None:
    assert len(samples) == 31
    assert sum(path.stat().st_size for path in EXAMPLES.glob("*.tar")) < 3_000_000


def test_all_but_the_broken_ones_are_opened(samples: list[Sample]) -> None:
    failed = {}
    for sample in samples:
        try:
            picture, facts = open_sample(sample)
        except SampleError as error:
            failed[sample.ref.key] = error.code
        else:
            assert max(picture.size) <= 640
            assert facts.note == ""
    assert failed == BROKEN


def test_the_rotated_one_is_upright(samples: list[Sample]) -> None:
    (rocket,) = (sample for sample in samples if sample.ref.key == "rocket")
    assert open_sample(rocket)[0].size == (640, 427)


def test_every_photograph_has_a_title_and_stands_in_the_list_of_sources(
    samples: list[Sample],
) -> None:
    listed = (EXAMPLES / "SOURCES.md").read_text(encoding="utf-8")
    for sample in samples:
        if sample.ref.key in BROKEN:
            assert f"`{sample.ref.member}`" in listed
            continue
        assert PromptTemplate("{json.title}").render(sample)
        about = kept_fields(sample, ["json.title", "json.author", "json.licence", "json.source"])
        assert all(f"| {value} |" in listed for value in (sample.ref.member, *about.values()))
