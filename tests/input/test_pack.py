"""A folder of pictures to shards, which the reader gives back picture by picture."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import JobError, RequestError
from pipeline.fixtures import make_image_bytes
from pipeline.input.pack import PackSettings, ShardNames, pack_folder
from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from pipeline.records import Sample

JPEG, PNG = make_image_bytes("JPEG"), make_image_bytes("PNG")


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return fill(
        tmp_path / "photos",
        {
            "p10.jpg": JPEG + b"10",
            "p2.JPG": JPEG + b"2",
            "p2.txt": b"two",
            "p2.json": b"{}",
            "sub/p1.png": PNG,
            "sub/lonely.txt": b"x",
            "notes.md": b"x",
            ".hidden.jpg": JPEG,
            "__MACOSX/p.jpg": JPEG,
        },
    )


def samples_of(paths: list[str]) -> list[Sample]:
    return [sample for shard in expand_shards(paths) for sample in read_shard(shard)]


def test_all_pictures_go_in_byte_for_byte_with_their_fields(photos: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = str(tmp_path / "shards/photos-{000000..}.tar")
    summary = pack_folder(photos, out, progress=lambda done, total: seen.append((done, total)))
    assert summary.shards == [str(tmp_path / "shards/photos-000000.tar")]
    assert (summary.num_images, summary.num_fields) == (3, 2)
    assert summary.findings.skipped == {"no picture": 2, "dot file": 1}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    found = samples_of(summary.shards)
    assert [(s.ref.member, s.data) for s in found] == [
        ("p2.jpg", JPEG + b"2"),
        ("p10.jpg", JPEG + b"10"),
        ("sub/p1.png", PNG),
    ]
    assert found[0].fields == {"txt": b"two", "json": b"{}"}
    assert not found[1].fields


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_them_as_they_were_meant(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", {"a.b.jpg": JPEG, "a.b.txt": b"t", "c.jpg": JPEG, "c.png": PNG})
    (shard,) = pack_folder(folder, str(tmp_path / "x-%03d.tar")).shards
    from webdataset.compat import WebDataset

    found = list(WebDataset(shard, shardshuffle=False))
    assert [one["__key__"] for one in found] == ["a_b", "c", "c-png"]
    assert found[0]["txt"] == b"t"
    assert found[2]["png"] == PNG


def test_keys_are_unique(tmp_path: Path) -> None:
    names = ["a.b.jpg", "a_b.jpg", "a.b.png", "a_b-png.png", "x/a_b.jpg"]
    folder = fill(tmp_path / "in", dict.fromkeys(names, JPEG))
    found = samples_of(pack_folder(folder, str(tmp_path / "x-{}.tar")).shards)
    assert len({sample.ref.key for sample in found}) == 5


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (PackSettings(max_samples=2), [2, 2, 1]),
        (PackSettings(max_bytes=2 * len(JPEG) + 40), [2, 2, 1]),
        (PackSettings(max_bytes=1), [1, 1, 1, 1, 1]),
    ],
)
def test_shards_are_bounded(tmp_path: Path, settings: PackSettings, sizes: list[int]) -> None:
    folder = fill(tmp_path / "in", {f"{i}.jpg": JPEG for i in range(5)})
    summary = pack_folder(folder, str(tmp_path / "s-%06d.tar"), settings)
    assert [len(samples_of([shard])) for shard in summary.shards] == sizes
    assert [os.path.basename(s) for s in summary.shards][:2] == ["s-000000.tar", "s-000001.tar"][
        : len(sizes)
    ]


def test_the_same_files_make_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    tars = []
    for out in ("one", "two"):
        (shard,) = pack_folder(photos, str(tmp_path / out / "s-%d.tar")).shards
        tars.append(Path(shard).read_bytes())
        os.utime(photos / "p10.jpg", (1, 1))
    assert tars[0] == tars[1]
    with tarfile.open(tmp_path / "one/s-0.tar") as tar:
        assert {(info.mtime, info.uid, info.uname) for info in tar} == {(0, 0, "")}


def test_existing_shards_are_not_overwritten_unless_told(photos: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "s-{000..}.tar")
    pack_folder(photos, out, PackSettings(max_samples=1))
    before = (tmp_path / "s-000.tar").read_bytes()
    with pytest.raises(RequestError, match=r"s-000\.tar exists \(3 such files\)"):
        pack_folder(photos, out)
    assert (tmp_path / "s-000.tar").read_bytes() == before
    summary = pack_folder(photos, out, PackSettings(overwrite=True))
    assert len(summary.shards) == 1
    assert summary.stale == [str(tmp_path / "s-001.tar"), str(tmp_path / "s-002.tar")]


def test_nothing_is_left_of_a_pack_that_fails(photos: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_folder(
            photos, str(tmp_path / "out/s-%d.tar"), PackSettings(max_samples=1), progress=fail
        )
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(RequestError, match="room for 2 shards"):
        pack_folder(photos, str(tmp_path / "out/s-{0..1}.tar"), PackSettings(max_samples=1))
    assert os.listdir(tmp_path / "out") == []


def test_a_place_that_cannot_be_written_is_one_line(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JobError, match=r"writing .*failed"):
        pack_folder(photos, str(tmp_path / "file/s-%d.tar"))


def test_loops_of_links_end_and_links_are_followed_once(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", {"a/x.jpg": JPEG})
    (folder / "a/loop").symlink_to(folder)
    (folder / "b").symlink_to(folder / "a")
    (folder / "y.jpg").symlink_to(folder / "a/x.jpg")
    summary = pack_folder(folder, str(tmp_path / "s-%d.tar"))
    assert summary.num_images == 2
    assert summary.findings.skipped["folder seen before"] == 2


def test_files_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", {"a.jpg": JPEG})
    (folder / "broken.jpg").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.jpg")
    summary = pack_folder(folder, str(tmp_path / "s-%d.tar"))
    assert summary.num_images == 1
    assert [path for path, _ in summary.findings.unreadable] == ["broken.jpg", "pipe.jpg"]


def test_strange_and_long_names_survive(tmp_path: Path) -> None:
    names = ["日本.jpg", "line\nbreak.jpg", f"{'n' * 200}.jpg", "photo", "no ext.d/q"]
    folder = fill(tmp_path / "in", dict.fromkeys(names, JPEG))
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jpg")).write_bytes(JPEG)
    found = samples_of(pack_folder(folder, str(tmp_path / "s-%d.tar")).shards)
    members = {sample.ref.member for sample in found}
    assert len(members) == 6
    assert {"日本.jpg", "line_break.jpg", f"{'n' * 200}.jpg", "photo.jpg"} < members
    assert "no ext.d/q.jpg" in members


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("o/s-%06d.tar", ["o/s-000000.tar", "o/s-000001.tar"]),
        ("s-{000005..}.tar", ["s-000005.tar", "s-000006.tar"]),
        ("s-{00..99}.tar", ["s-00.tar", "s-01.tar"]),
        ("{}.tar", ["000000.tar", "000001.tar"]),
        ("s%d.tar", ["s0.tar", "s1.tar"]),
    ],
)
def test_both_forms_of_numbered_names_are_known(pattern: str, paths: list[str]) -> None:
    names = ShardNames.parse(pattern)
    assert [names.path(i) for i in range(2)] == paths


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("s.tar", "no place for a number"),
        ("s-%d-{0..}.tar", "2 place"),
        ("a%d/s-%d.tar", "place for a number"),
        ("s-%06d.zip", "does not end in .tar"),
        ("s-{…}.tar", "no place"),
    ],
)
def test_other_names_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ShardNames.parse(pattern)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no picture"):
        pack_folder(tmp_path, str(tmp_path / "s-%d.tar"))
    with pytest.raises(RequestError, match="is not a folder"):
        pack_folder(tmp_path / "none", str(tmp_path / "s-%d.tar"))
    with pytest.raises(RequestError, match="--max-samples"):
        PackSettings(max_samples=0)
