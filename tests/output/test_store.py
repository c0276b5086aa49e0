"""Rows to Parquet: what is committed, what counts, and what a crash leaves."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import JobError, RequestError, ShardError
from pipeline.fixtures import make_photo_shard
from pipeline.input.identity import identify
from pipeline.input.shards import expand_shards
from pipeline.output import commit, merge, resume
from pipeline.output.job_record import JobRecord, check_folder, check_place, claim_folder
from pipeline.output.local import LocalFolder
from pipeline.output.schema import RowSchema
from pipeline.output.store import CommitSettings, Store
from pipeline.records import ImageFacts, Row, SampleRef, Shard

RECORD = JobRecord({"prompt": "say", "seed": 0})
NUM_IMAGES = 12


def make_row(shard: Shard, index: int, caption_index: int = 0, caption: str = "") -> Row:
    ref = SampleRef(shard.id, index, f"k{index}", f"k{index}.jpg")
    text = caption or f"caption {index}.{caption_index}"
    return Row(ref, ImageFacts(4, 3, "JPEG", "ab"), "ok", caption_index, text)


class Folder:
    """An output folder, one shard, and as many stores as a test wants."""

    def __init__(self, root: Path, *, num_captions: int = 1) -> None:
        make_photo_shard(root / "a.tar", NUM_IMAGES)
        (self.shard,) = expand_shards([str(root / "a.tar")])
        self.out = root / "out"
        self.schema = RowSchema(num_captions)
        self.place = LocalFolder(self.out)
        claim_folder(self.place, RECORD)

    def store(self, worker: str = "w", rows: int = 4, seconds: float = 1e9) -> Store:
        store = Store(self.place, RECORD, self.schema, CommitSettings(rows, seconds), worker)
        store.begin(self.state, identify(self.shard))
        return store

    @property
    def state(self) -> resume.ShardState:
        return resume.shard_state(self.place, self.shard, RECORD.fingerprint)

    @property
    def final(self) -> Path:
        return self.out / resume.final_name(self.shard.id)

    @property
    def pieces(self) -> list[Path]:
        return [self.out / name for name in resume.piece_names(self.place, self.shard.id)]

    def finish(self, store: Store, without: frozenset[int] = frozenset()) -> None:
        for index in range(NUM_IMAGES):
            if index not in without:
                for caption_index in range(self.schema.num_captions):
                    store.add(make_row(self.shard, index, caption_index))
        store.end(self.shard.id, NUM_IMAGES)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def indices_of(path: Path) -> list[int]:
    return list(read(path).column("index").to_pylist())


def read(path: Path) -> pa.Table:
    return resume.read_rows(LocalFolder(path.parent), path.name)


def test_rows_in_any_order_end_in_shard_order(folder: Folder) -> None:
    store = folder.store()
    order = list(range(NUM_IMAGES))
    random.Random(1).shuffle(order)
    for index in order:
        store.add(make_row(folder.shard, index))
    assert len(folder.pieces) == 3
    assert not folder.final.exists()
    store.end(folder.shard.id, NUM_IMAGES)
    assert indices_of(folder.final) == list(range(NUM_IMAGES))
    assert not folder.pieces
    store.close()
    assert sorted(os.listdir(folder.out)) == ["_job.json", folder.final.name]


def test_captions_of_an_image_stay_together_and_have_their_index(tmp_path: Path) -> None:
    folder = Folder(tmp_path, num_captions=2)
    store = folder.store(rows=2)
    store.add(make_row(folder.shard, 1, 1))
    store.add(make_row(folder.shard, 0, 0))
    store.commit()
    assert not folder.pieces, "half a sample is not committed"
    store.add(make_row(folder.shard, 1, 0))
    assert folder.state.committed == {1}
    store.add(make_row(folder.shard, 0, 1))
    for index in range(2, NUM_IMAGES):
        store.add(make_row(folder.shard, index, 1))
        store.add(make_row(folder.shard, index, 0))
    store.end(folder.shard.id, NUM_IMAGES)
    table = read(folder.final)
    assert table.column("caption_index").to_pylist() == [0, 1] * NUM_IMAGES


def test_a_restart_skips_exactly_what_is_committed(folder: Folder) -> None:
    first = folder.store()
    for index in (0, 3, 5, 7, 8):
        first.add(make_row(folder.shard, index))
    assert folder.state.committed == {0, 3, 5, 7}, "8 was never committed"
    assert folder.state.num_rows == 4
    folder.finish(folder.store("x"), without=frozenset({0, 3, 5, 7}))
    assert indices_of(folder.final) == list(range(NUM_IMAGES))
    assert folder.state.is_done


def test_equal_rows_make_equal_files_whatever_the_pieces(tmp_path: Path) -> None:
    contents = set()
    (tmp_path / "x").mkdir()
    folder = Folder(tmp_path / "x")
    for rows in (1, 5, 100):
        folder.finish(folder.store(rows=rows))
        contents.add(folder.final.read_bytes())
        folder.final.unlink()
    assert len(contents) == 1


def test_the_file_says_what_made_it(folder: Folder) -> None:
    folder.finish(folder.store())
    metadata = pq.read_metadata(folder.final).metadata
    assert json.loads(metadata[b"captionjob"])["settings"] == {"prompt": "say", "seed": 0}
    assert json.loads(metadata[b"captionjob.shard"])["url"] == folder.shard.url
    assert json.loads((folder.out / "_job.json").read_text())["fingerprint"] == RECORD.fingerprint


def test_rows_that_waited_long_enough_are_committed(folder: Folder) -> None:
    store = folder.store(rows=100, seconds=0.001)
    store.add(make_row(folder.shard, 0))
    time.sleep(0.01)
    store.commit_if_due()
    assert folder.state.committed == {0}


def test_an_empty_shard_has_an_empty_file(folder: Folder) -> None:
    store = folder.store()
    store.end(folder.shard.id, 0)
    table = read(folder.final)
    assert table.num_rows == 0
    assert table.schema.names == folder.schema.arrow().names


# What does not count


def test_a_file_without_a_footer_is_set_aside(folder: Folder) -> None:
    store = folder.store()
    for index in range(8):
        store.add(make_row(folder.shard, index))
    bad = folder.pieces[0]
    bad.write_bytes(bad.read_bytes()[:-9])
    state = folder.state
    assert state.committed == {4, 5, 6, 7}
    resume.tidy(folder.place, state.leftovers)
    assert bad not in folder.pieces
    assert len(list((folder.out / "_aside").iterdir())) == 1


def test_a_short_file_under_a_shards_name_is_set_aside_and_made_again(folder: Folder) -> None:
    folder.final.write_bytes(b"PAR1")
    state = folder.state
    assert not state.is_done
    resume.tidy(folder.place, state.leftovers)
    folder.finish(folder.store())
    assert folder.state.is_done


def test_a_dead_process_leaves_a_temporary_file_that_is_removed(folder: Folder) -> None:
    progress = folder.out / resume.progress_folder(folder.shard.id)
    progress.mkdir(parents=True)
    mine = commit.temporary_path(progress, "0.parquet")
    mine.write_bytes(b"half")
    assert not folder.state.leftovers, "this process lives"
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-4194304-"))
    mine.rename(dead)
    state = folder.state
    assert [folder.out / leftover.name for leftover in state.leftovers] == [dead]
    resume.tidy(folder.place, state.leftovers)
    assert not dead.exists()


@pytest.mark.parametrize("change", ["bytes", "time", "size"])
def test_pieces_of_a_changed_shard_are_never_mixed(folder: Folder, change: str) -> None:
    store = folder.store()
    for index in range(4):
        store.add(make_row(folder.shard, index))
    path = Path(folder.shard.url)
    before = path.stat()
    data = bytearray(path.read_bytes())
    if change == "size":
        data += bytes(512)
    elif change == "bytes":
        data[700] ^= 1
    path.write_bytes(data)
    time_ns = before.st_mtime_ns + (change == "time")
    os.utime(path, ns=(before.st_atime_ns, time_ns))
    state = folder.state
    assert not state.committed
    assert [leftover.reason for leftover in state.leftovers] == [resume.CHANGED]


def test_a_shard_that_changes_while_it_is_read_fails(folder: Folder) -> None:
    store = folder.store()
    os.utime(folder.shard.url, ns=(1, 1))
    folder.finish(store)
    assert "changed while it was read" in store.failed[folder.shard.id]
    assert not folder.final.exists()


def test_a_finished_shard_outlives_a_copy_but_not_a_change(folder: Folder) -> None:
    folder.finish(folder.store())
    os.utime(folder.shard.url, ns=(1, 1))
    assert folder.state.is_done, "the same bytes, copied"
    data = bytearray(Path(folder.shard.url).read_bytes())
    data[700] ^= 1
    Path(folder.shard.url).write_bytes(data)
    state = folder.state
    assert not state.is_done
    resume.tidy(folder.place, state.leftovers)
    folder.finish(folder.store("later"))
    assert folder.state.is_done


def test_pieces_of_other_settings_do_not_count(folder: Folder) -> None:
    store = folder.store()
    for index in range(4):
        store.add(make_row(folder.shard, index))
    other = resume.shard_state(folder.place, folder.shard, "another")
    assert not other.committed
    assert other.leftovers[0].reason == "made with other settings"


# Crashes, twins, failures


def test_an_exception_while_writing_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.store()
    for index in range(4):
        store.add(make_row(folder.shard, index))

    def broken(parts: object) -> Iterator[pa.Table]:
        yield folder.schema.table([make_row(folder.shard, 0)])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge, "merged", broken)
    with pytest.raises(JobError, match="cannot be written: No space left"):
        folder.finish(store, without=frozenset(range(4)))
    assert not folder.final.exists()
    files = [path for path in folder.out.rglob("*") if commit.is_temporary(path.name)]
    assert not files
    assert folder.state.committed >= {0, 1, 2, 3}, "the pieces stand"


def test_a_crash_between_the_file_and_its_pieces_is_tidied(folder: Folder) -> None:
    store = folder.store()
    for index in range(4):
        store.add(make_row(folder.shard, index))
    kept = {path: path.read_bytes() for path in folder.pieces}
    folder.finish(store, without=frozenset(range(4)))
    for path, data in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    state = folder.state
    assert state.is_done
    resume.tidy(folder.place, state.leftovers)
    assert not folder.pieces


def test_the_first_of_two_twins_wins_and_the_other_harms_nothing(folder: Folder) -> None:
    one, two = folder.store("one"), folder.store("two")
    for index in range(6):
        two.add(make_row(folder.shard, index))
    folder.finish(one)
    content = folder.final.read_bytes()
    for index in range(6, NUM_IMAGES):
        two.add(make_row(folder.shard, index))
    two.end(folder.shard.id, NUM_IMAGES)
    two.close()
    assert folder.final.read_bytes() == content
    assert indices_of(folder.final) == list(range(NUM_IMAGES))
    assert (one.counters.shards, two.counters.shards) == (1, 0)
    assert not (folder.out / "_progress").exists()


def test_a_stranger_under_the_files_name_is_no_twin(folder: Folder) -> None:
    store = folder.store(rows=100)
    folder.final.write_bytes(b"something else")
    folder.finish(store)
    assert "is in its way: no Parquet file of captionjob" in store.failed[folder.shard.id]
    assert folder.final.read_bytes() == b"something else"


def test_a_damaged_shard_keeps_its_rows_and_is_named(folder: Folder) -> None:
    store = folder.store()
    store.add(make_row(folder.shard, 0))
    store.fail(folder.shard, ShardError(folder.shard.url, "cut at byte 7"))
    store.close()
    assert folder.state.committed == {0}
    (failed,) = json.loads((folder.out / "_failed.json").read_text())["shards"]
    assert failed["error"] == "cut at byte 7"
    folder.finish(folder.store("later"), without=frozenset({0}))
    assert not (folder.out / "_failed.json").exists()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_merging_gives_each_index_once_in_order(data: st.DataObject) -> None:
    """Pieces overlap in any way, and twins hold the same samples."""
    num_captions = data.draw(st.integers(1, 3))
    schema = RowSchema(num_captions)
    shard = Shard("s", "s.tar")
    groups = data.draw(st.lists(st.sets(st.integers(0, 30), min_size=1), max_size=6))
    parts = []
    for number, group in enumerate(groups):
        rows = [
            make_row(shard, index, caption_index, f"from {number}")
            for index in group
            for caption_index in range(num_captions)
        ]
        table = schema.table(rows)
        parts.append(merge.Part(min(group), lambda table=table: table))
    found = [row for table in merge.merged(parts) for row in table.to_pylist()]
    wanted = sorted(set().union(*groups)) if groups else []
    pairs = [(row["index"], row.get("caption_index", 0)) for row in found]
    assert pairs == [(index, i) for index in wanted for i in range(num_captions)]
    for index in wanted:
        assert len({row["caption"] for row in found if row["index"] == index}) == 1


def test_merging_cuts_row_groups_at_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "ROW_GROUP", 4)
    schema, shard = RowSchema(), Shard("s", "s.tar")
    tables = [schema.table([make_row(shard, i) for i in range(a, a + 5)]) for a in (0, 5, 10)]
    parts = [merge.Part(5 * n, lambda table=table: table) for n, table in enumerate(tables)]
    assert [table.num_rows for table in merge.merged(parts)] == [4, 4, 4, 3]


# The output folder


def test_another_setting_is_refused_field_by_field(folder: Folder) -> None:
    other = JobRecord({"prompt": "sing", "seed": 0, "top_k": 3})
    with pytest.raises(RequestError) as caught:
        check_folder(folder.place, other)
    assert 'prompt: "say" there, "sing" now' in str(caught.value)
    assert "top_k: nothing there, 3 now" in str(caught.value)
    assert "seed" not in str(caught.value)


def test_overwrite_moves_the_old_output_aside(folder: Folder) -> None:
    folder.finish(folder.store())
    moved = claim_folder(folder.place, JobRecord({"prompt": "sing"}), overwrite=True)
    assert moved is not None
    old = Path(moved)
    assert (old / folder.final.name).exists()
    assert (old / "_job.json").exists()
    assert sorted(os.listdir(folder.out)) == ["_job.json", old.name]


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(RequestError, match=r"thesis\.doc"):
        claim_folder(LocalFolder(tmp_path), RECORD, overwrite=True)
    with pytest.raises(RequestError, match="is a file"):
        claim_folder(LocalFolder(tmp_path / "thesis.doc"), RECORD)
    with pytest.raises(RequestError, match="is not a folder"):
        claim_folder(LocalFolder(tmp_path / "thesis.doc" / "out"), RECORD)


def test_checking_a_folder_writes_nothing(tmp_path: Path) -> None:
    check_folder(LocalFolder(tmp_path / "new" / "out"), RECORD)
    assert not list(tmp_path.iterdir())


def test_a_kept_field_may_not_take_a_columns_name() -> None:
    with pytest.raises(RequestError, match="--keep caption"):
        RowSchema(kept=("caption",))
    with pytest.raises(RequestError, match="--keep txt"):
        RowSchema(kept=("txt", "txt"))


def test_half_a_surrogate_pair_costs_no_job(folder: Folder) -> None:
    table = RowSchema().table([make_row(folder.shard, 0, caption="a \ud800 b")])
    assert table.column("caption").to_pylist() == ["a \\ud800 b"]


def test_the_schema_is_fixed() -> None:
    names = [
        *("shard", "index", "key", "member", "caption", "status", "error", "error_detail"),
        *("finish_reason", "num_prompt_tokens", "num_caption_tokens", "mean_logprob"),
        *("width", "height", "format", "sha256"),
    ]
    assert RowSchema().arrow().names == names
    assert RowSchema(2, ("json.title",)).arrow().names == [
        *names[:2],
        "caption_index",
        *names[2:],
        "json.title",
    ]


def test_a_folder_that_a_twin_claims_this_moment_is_no_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that start together: one looks for `_job.json` before the other wrote it."""
    names = LocalFolder.names

    def claimed_meanwhile(folder: LocalFolder, place: str = "") -> list[str]:
        (tmp_path / "_job.json").write_text("{}")
        return names(folder, place)

    monkeypatch.setattr(LocalFolder, "names", claimed_meanwhile)
    check_place(LocalFolder(tmp_path))
