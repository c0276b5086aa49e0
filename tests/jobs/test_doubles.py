"""`--dedupe`: identical images of a shard are captioned once, and every image has its own row."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.config import RunConfig, WorkerSettings
from jobs.doubles import Double, Doubles
from jobs.result import RunResult, summary
from jobs.results import read_output
from jobs.run import Run
from jobs.stopping import Stop
from jobs.verify_view import SampleRequest, print_verification
from pipeline.backends.scripted import ScriptedCaptioner
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.images.opening import facts_of
from pipeline.output.store import CommitSettings, Store
from pipeline.records import Caption, ImageFacts, Request, Row, SampleRef

PICTURES = [make_image_bytes(seed=seed) for seed in range(4)] + [b"no picture", b""]
UNOPENED = (b"",)  # nothing to compare: each is an error of its own
COLUMNS = ("shard", "index", "caption_index", "key", "member", "caption", "status", "error")


@dataclass(frozen=True)
class Case:
    """Shards as picture numbers with a title each, and how a run is made."""

    shards: list[list[tuple[int, str]]]
    num_captions: int
    slots: int
    loader_workers: int
    commit_rows: int
    shuffle: int
    stop_after: int

    @property
    def num_distinct(self) -> int:
        """Images that have to be made ready."""
        total = 0
        for shard in self.shards:
            alone = [one for one in shard if PICTURES[one[0]] in UNOPENED]
            total += len(alone) + len(set(shard) - set(alone))
        return total


samples = st.tuples(st.integers(0, len(PICTURES) - 1), st.sampled_from(["a cat", "a dog"]))
cases = st.builds(
    Case,
    shards=st.lists(st.lists(samples, max_size=14), min_size=1, max_size=3),
    num_captions=st.integers(1, 3),
    slots=st.sampled_from([3, 8, 64]),
    loader_workers=st.integers(1, 4),
    commit_rows=st.sampled_from([1, 4, 1000]),
    shuffle=st.integers(0, 9),
    stop_after=st.integers(1, 30),
)


@contextmanager
def job(case: Case, *, is_greedy: bool) -> Iterator[RunConfig]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        for number, shard in enumerate(case.shards):
            members = []
            for index, (picture, title) in enumerate(shard):
                members.append((f"{number}{index:03d}.jpg", PICTURES[picture]))
                text = json.dumps({"title": title, "n": index})
                members.append((f"{number}{index:03d}.json", text.encode()))
            (folder / "shards" / f"{number}.tar").write_bytes(make_tar_bytes(members))
        many = SamplingSettings(num_captions=case.num_captions, temperature=1.0)
        yield RunConfig(
            shards=(str(folder / "shards"),),
            out=folder / "out",
            model=f"scripted:shuffle={case.shuffle},greedy={int(is_greedy)}",
            prompt="Say {json.title}.",
            keep=("json.n",),
            sampling=many if case.num_captions > 1 else SamplingSettings(),
            speed=SpeedSettings(slots=case.slots, prefill_batch=2),
            commit=CommitSettings(rows=case.commit_rows),
            worker=WorkerSettings(loader_workers=case.loader_workers),
            dedupe=True,
        )


def rows_of(out: Path) -> list[dict[str, object]]:
    paths = sorted(out.glob("*.parquet"))
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_where_the_key_has_no_say_the_rows_are_those_of_a_run_without(case: Case) -> None:
    with job(case, is_greedy=True) as config:
        result = Run(config).run()
        plain = replace(config, dedupe=False, out=config.out.with_name("plain"))
        wanted = Run(plain).run()
        assert rows_of(config.out) == rows_of(plain.out)
        assert wanted.snapshot.copied_images == 0
        num_images = sum(map(len, case.shards))
        assert result.snapshot.images == wanted.snapshot.images == num_images
        assert num_images - result.snapshot.copied_images == case.num_distinct


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_stopped_anywhere_and_started_again_the_rows_are_the_same(case: Case) -> None:
    with job(case, is_greedy=False) as config:
        Run(config).run()
        wanted = rows_of(config.out)
        again = replace(config, out=config.out.with_name("again"), model="scripted:shuffle=3")
        _run_and_stop(again, case.stop_after)
        assert Run(again).run().exit_code == 0
        assert rows_of(again.out) == wanted


def _run_and_stop(config: RunConfig, num_rows: int) -> None:
    stop, add = Stop(), Store.add

    def counting(store: Store, row: Row) -> None:
        add(store, row)
        if store.counters.rows >= num_rows:
            stop.request("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "add", counting)
        Run(config, stop).run()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    pictures = [0, 1, 0, 0, 2, 1, 0]
    members = [(f"{place}.jpg", PICTURES[one]) for place, one in enumerate(pictures)]
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(make_tar_bytes(members))
    return RunConfig(shards=(str(tmp_path),), out=tmp_path / "out", model="scripted", dedupe=True)


def run(config: RunConfig) -> RunResult:
    return Run(config).run()


def test_doubles_of_another_shard_are_captioned_there_too(config: RunConfig) -> None:
    result = run(config)
    assert (result.snapshot.images, result.snapshot.copied_images) == (14, 8)
    assert summary(result)[0].startswith("6 images captioned in ")
    assert "8 more copied from identical ones" in summary(result)[0]
    first, _, second, *_ = rows_of(config.out)
    assert (first["key"], second["key"]) == ("0", "2")
    for name in ("caption", "mean_logprob", "num_caption_tokens", "sha256", "width"):
        assert first[name] == second[name]


def test_what_becomes_of_the_first_becomes_of_its_doubles(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ScriptedCaptioner, source: object) -> Iterator[Caption]:
        for caption in ask(self, source):  # type: ignore[arg-type]
            error = {"text": None, "error": "not_finite", "error_detail": "it is not"}
            is_first = caption.request.facts.sha256 == digest
            yield replace(caption, **error) if is_first else caption  # type: ignore[arg-type]

    ask = ScriptedCaptioner.caption
    digest = facts_of(PICTURES[0]).sha256
    monkeypatch.setattr(ScriptedCaptioner, "caption", broken)
    result = run(config)
    assert result.errors == {"not_finite": 8}
    assert [row["error"] for row in rows_of(config.out)][:3] == ["not_finite", None, "not_finite"]


def test_the_network_sees_each_picture_once_and_never_a_key(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    prepare = ScriptedCaptioner.prepare

    def noting(self: ScriptedCaptioner, *arguments: object) -> Request:
        asked.append(prepare(self, *arguments))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(ScriptedCaptioner, "prepare", noting)
    run(config)
    assert len(asked) == 6
    assert all(request.ref.key.startswith("sha256:") for request in asked)


def test_only_sampled_captions_make_it_a_setting_of_the_job(config: RunConfig) -> None:
    def settings_of(config: RunConfig) -> set[str]:
        return set(config.record(config.source()).settings)

    assert "dedupe" not in settings_of(config)
    sampled = replace(config, sampling=SamplingSettings(temperature=0.5))
    assert "dedupe" in settings_of(sampled)
    assert "dedupe" not in settings_of(replace(sampled, dedupe=False))


def test_memory_of_who_was_first_ends_with_the_shard(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Doubles] = []
    begin = Doubles.__init__

    def noting(self: Doubles, num_captions: int) -> None:
        begin(self, num_captions)
        made.append(self)

    monkeypatch.setattr(Doubles, "__init__", noting)
    run(config)
    (doubles,) = made
    assert len(doubles._firsts) == 1, "the last shard's"
    assert not doubles._in_work


def test_a_shard_that_comes_again_behind_another_loses_no_double() -> None:
    doubles = Doubles(1)
    first, second = (Double(SampleRef("a", i, str(i), str(i)), {}, "same") for i in (0, 1))
    assert doubles.is_first(first)
    doubles.enter("a")
    assert not doubles.is_first(second)
    doubles.enter("b")
    assert doubles.join(second) == []
    row = Row(first.known_as, ImageFacts(), "ok", caption="a cat")
    assert [one.ref.key for one in doubles.settle(row)] == ["0", "1"]


def test_sampled_captions_of_doubles_are_the_same_when_made_again_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real network: `verify --sample` draws the numbers as the job did."""
    data = make_image_bytes(seed=5)
    members = [("x.jpg", data), ("y.jpg", data), ("z.jpg", data)]
    (tmp_path / "a.tar").write_bytes(make_tar_bytes(members))
    config = RunConfig(
        shards=(str(tmp_path / "a.tar"),),
        out=tmp_path / "out",
        sampling=SamplingSettings(temperature=2.0, max_new_tokens=12, num_captions=2),
        speed=SpeedSettings(slots=4, prefill_batch=2),
        dedupe=True,
    )
    result = Run(config).run()
    assert (result.snapshot.images, result.snapshot.copied_images) == (3, 2)
    captions = [row["caption"] for row in rows_of(config.out)]
    assert captions[:2] == captions[2:4] == captions[4:]
    assert read_output(config.out).record.settings["dedupe"] is True
    sample = SampleRequest(count=3)
    found = print_verification(
        config.out, [str(tmp_path / "a.tar")], sample, sys.stdout, as_json=False
    )
    assert found == 0, capsys.readouterr().out
