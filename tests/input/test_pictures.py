"""A folder of pictures is read as it lies, in parts that a new picture does not shift."""

from __future__ import annotations

import errno
import os
from collections.abc import Container
from pathlib import Path

import pytest

from pipeline.errors import RequestError, SampleError, ShardError
from pipeline.fixtures import make_image_bytes, make_shard
from pipeline.images.opening import open_sample
from pipeline.input import pictures
from pipeline.input.checks import check_fields
from pipeline.input.identity import identify, stamp_of
from pipeline.input.pictures import MAX_PART, MIN_PART, stale_parts
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.input.shards import expand_shards, left_aside
from pipeline.records import Columns, Sample, Shard

PICTURE = make_image_bytes()


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image_bytes(seed=len(name)) if name != "empty.jpg" else b"")
    return folder


def read(shard: Shard, skip: Container[int] = (), **settings: object) -> list[Sample]:
    return list(read_shard(shard, ReaderSettings(**settings), skip=skip))  # type: ignore[arg-type]


def numbered(folder: Path, count: int) -> Path:
    """Make a folder of so many empty pictures, in two folders."""
    for place in ("a", "b"):
        (folder / place).mkdir(parents=True)
        for number in range(count // 2):
            (folder / place / f"{number}.jpg").touch()
    return folder


def names_of(shards: list[Shard]) -> dict[str, tuple[tuple[str, ...], ...] | None]:
    return {shard.id: shard.pictures for shard in shards}


def test_pictures_become_samples_with_the_fields_beside_them(tmp_path: Path) -> None:
    fill(tmp_path, "b10.jpg", "b2.PNG", "sub/c.d.webp", ".hidden.jpg", "__MACOSX/x.jpg", "noext")
    (tmp_path / "b2.txt").write_text("two")
    (tmp_path / "sub" / "c.d.json").write_text("{}")
    (tmp_path / "lonely.txt").write_text("nobody's")
    (shard,) = expand_shards([str(tmp_path)])
    found = read(shard)
    assert [(one.ref.index, one.ref.key, one.ref.member) for one in found] == [
        (0, "b2", "b2.PNG"),
        (1, "b10", "b10.jpg"),
        (2, "noext", "noext"),
        (3, "sub/c.d", "sub/c.d.webp"),
    ]
    assert [dict(one.fields) for one in found] == [{"txt": b"two"}, {}, {}, {"json": b"{}"}]
    assert found[0].data == (tmp_path / "b2.PNG").read_bytes()
    assert read(shard, fields=frozenset({"json"}))[0].fields == {}
    assert shard.size == sum(
        (tmp_path / path).stat().st_size for one in shard.pictures or () for path in one
    )


def test_a_picture_that_cannot_be_read_costs_its_row_alone(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg", "empty.jpg", "gone.jpg", "large.jpg")
    (tmp_path / "dangling.jpg").symlink_to("nowhere")
    (tmp_path / "large.jpg").write_bytes(PICTURE * 10)
    os.mkfifo(tmp_path / "pipe.jpg")
    (shard,) = expand_shards([str(tmp_path)])
    (tmp_path / "gone.jpg").unlink()
    codes = {}
    for sample in read(shard, max_member_bytes=len(PICTURE) * 5):
        try:
            open_sample(sample)
        except SampleError as error:
            codes[sample.ref.member] = error.code
    assert codes == {
        "dangling.jpg": "unreadable",
        "empty.jpg": "empty",
        "gone.jpg": "unreadable",
        "large.jpg": "too_large",
        "pipe.jpg": "unreadable",
    }


def test_a_failing_file_system_costs_the_shard_and_not_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = expand_shards([str(fill(tmp_path, "a.jpg"))])

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pictures, "open", fails, raising=False)
    with pytest.raises(ShardError, match=r"a\.jpg: Input/output error"):
        read(shard)


def test_what_is_skipped_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = expand_shards([str(fill(tmp_path, "a.jpg", "b.jpg", "c.jpg"))])
    opened: list[str] = []
    original = pictures._read
    monkeypatch.setattr(
        pictures,
        "_read",
        lambda *words: opened.append(words[1]) or original(*words),
    )
    stats = ShardStats()
    assert [one.ref.index for one in read_shard(shard, skip={0, 2}, stats=stats)] == [1]
    assert opened == ["b.jpg"]
    assert (stats.num_images, stats.num_skipped, stats.num_samples) == (3, 2, 1)
    assert stats.bytes_passed <= (shard.size or 0)


def test_a_large_folder_is_divided_and_each_picture_is_in_one_part(tmp_path: Path) -> None:
    shards = expand_shards([str(numbered(tmp_path / "photos", 6000))])
    sizes = [len(shard.pictures or ()) for shard in shards]
    assert sum(sizes) == 6000
    assert 3 <= len(shards) <= 12
    assert max(sizes) <= MAX_PART
    assert min(sizes[:-1]) >= MIN_PART
    paths = [one[0] for shard in shards for one in shard.pictures or ()]
    assert paths == [f"{place}/{number}.jpg" for place in "ab" for number in range(3000)]
    assert len({shard.id for shard in shards}) == len({s.url for s in shards}) == len(shards)


@pytest.mark.parametrize("name", ["a/0000.jpg", "a/1500x.jpg", "b/99999.jpg", "c/new.jpg"])
def test_a_new_picture_changes_its_own_part_and_hardly_another(tmp_path: Path, name: str) -> None:
    photos = numbered(tmp_path / "photos", 6000)
    before = names_of(expand_shards([str(photos)]))
    fill(photos, name)
    shards = expand_shards([str(photos)])
    after = names_of(shards)
    changed = {one for one in after if before.get(one) != after[one]}
    assert 1 <= len(changed) <= 2
    gone = [f"{one}.parquet" for one in before if one not in after]
    assert sorted(stale_parts([*gone, *(f"{one}.parquet" for one in after)], shards)) == gone


def test_parts_of_another_folder_are_not_stale(tmp_path: Path) -> None:
    shards = expand_shards([str(fill(tmp_path / "photos", "a.jpg"))])
    names = ["photos-12345678-0123456789.parquet", "x.parquet", "_job.json", shards[0].id]
    assert stale_parts(names, shards) == []
    assert stale_parts([f"{shards[0].id}-0123456789.parquet"], shards) != []


def test_pictures_of_one_stem_stay_in_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_PART", 3)
    fill(tmp_path, "a.jpg", "b.jpg", "c.jpg", "c.png", "d.jpg")
    shards = expand_shards([str(tmp_path)])
    assert [[one[0] for one in shard.pictures or ()] for shard in shards] == [
        ["a.jpg", "b.jpg", "c.jpg", "c.png"],
        ["d.jpg"],
    ]


def test_any_change_of_a_file_is_another_identity(tmp_path: Path) -> None:
    """Also one that keeps the size, and one of a field; a copy of the folder has the same bytes."""
    folder = fill(tmp_path / "photos", "a.jpg", "b.jpg")
    (folder / "a.txt").write_text("one")
    (shard,) = expand_shards([str(folder)])
    first = identify(shard)
    assert (first.size, first.mtime_ns) == stamp_of(shard)
    os.utime(folder / "a.jpg", ns=(1, 1))
    assert stamp_of(shard) != (first.size, first.mtime_ns)
    assert identify(shard).has_same_bytes(first)
    (folder / "a.txt").write_text("two")
    assert not identify(shard).has_same_bytes(first)
    (folder / "a.txt").write_text("one")
    assert identify(shard).has_same_bytes(first)
    (folder / "b.jpg").write_bytes(b"x" * (folder / "b.jpg").stat().st_size)
    assert not identify(shard).has_same_bytes(first)
    fill(folder, "b.jpg")
    folder.rename(tmp_path / "moved")
    (moved,) = expand_shards([str(tmp_path / "moved")])
    assert moved.id != shard.id
    assert identify(moved).has_same_bytes(first)


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "a.jpg")
    fill(tmp_path / "elsewhere", "b.jpg")
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "loop").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "c.jpg").symlink_to(tmp_path / "elsewhere" / "b.jpg")
    (shard,) = expand_shards([str(tmp_path / "photos")])
    assert [one.ref.member for one in read(shard)] == ["a.jpg", "c.jpg", "link/b.jpg"]
    assert all(sample.data for sample in read(shard))


def test_tars_win_over_parquet_and_both_over_pictures_and_it_is_said(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "_metadata.parquet").write_bytes(b"PAR1")
    assert [shard.url for shard in expand_shards([str(tmp_path)])] == [str(tmp_path / "x.parquet")]
    assert left_aside([str(tmp_path)]) == [
        f"{tmp_path} has Parquet files; 2 pictures beside them are left aside"
    ]
    make_shard(tmp_path / "x.tar", [])
    assert [shard.url for shard in expand_shards([str(tmp_path)])] == [str(tmp_path / "x.tar")]
    assert left_aside([str(tmp_path), str(tmp_path / "x.tar"), "pipe:cat x"]) == [
        f"{tmp_path} has tars; 1 Parquet files and 2 pictures beside them are left aside"
    ]


def test_a_picture_alone_is_no_shard(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg")
    for pattern in ("a.jpg", "*.jpg", "{a,b}.jpg", "*"):
        with pytest.raises(RequestError, match=r"a\.jpg is a picture, and no shard"):
            expand_shards([str(tmp_path / pattern)])


def test_a_folder_with_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").touch()
    with pytest.raises(RequestError, match="no tar, Parquet file or picture in it"):
        expand_shards([str(tmp_path)])


def test_tars_in_folders_below_are_not_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, "preview/a.jpg")
    (tmp_path / "shards").mkdir()
    make_shard(tmp_path / "shards" / "x.tar", [])
    with pytest.raises(RequestError, match=r"pictures and 1 tars in folders below; .*\*\*/\*\.tar"):
        expand_shards([str(tmp_path)])


def test_fields_that_no_picture_of_a_folder_has_are_refused(tmp_path: Path) -> None:
    shards = expand_shards([str(fill(tmp_path, "a.jpg"))])
    check_fields(shards, Columns(), {"txt", "json"})
    with pytest.raises(RequestError, match="have the fields json and txt, not 'caption'"):
        check_fields(shards, Columns(), {"caption"})
