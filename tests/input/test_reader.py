"""A shard to its samples, whatever it holds, and damage told from a whole shard."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import tracemalloc
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ShardError
from pipeline.fixtures import make_image_bytes, make_tar_bytes
from pipeline.input import reader
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.records import Sample, Shard

# Five samples, jpg + txt: header 512, data padded to 512, so each sample takes 2048 bytes.
TRUTH = [(f"{key}.{kind}", f"{key}{kind}".encode()) for key in "abcde" for kind in ("jpg", "txt")]
WHOLE = make_tar_bytes(TRUTH)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


def read(
    path: Path,
    data: bytes,
    *,
    skip: Container[int] = (),
    stats: ShardStats | None = None,
    **options: Any,
) -> tuple[list[Sample], ShardError | None]:
    """Return the samples, and the error at the end if there was one."""
    path.write_bytes(data)
    samples: list[Sample] = []
    error = None
    try:
        samples.extend(
            read_shard(Shard("x", str(path)), ReaderSettings(**options), skip=skip, stats=stats)
        )
    except ShardError as caught:
        error = caught
    assert error is None or error.shard == str(path)
    return samples, error


def keys(samples: list[Sample]) -> str:
    return " ".join(sample.ref.key for sample in samples)


def whole(path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]]) -> list[Sample]:
    samples, error = read(path, make_tar_bytes(members))
    assert error is None
    assert [sample.ref.index for sample in samples] == list(range(len(samples)))
    return samples


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


# --- the damage table: what each kind of damage must come out as ---


def flip(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def two_gzips(data: bytes) -> bytes:
    return gzip.compress(data[:3000]) + gzip.compress(data[3000:])


SIZE_FIELD = 2048 + 124
DAMAGED = {
    "cut inside a member's data": (WHOLE[: 4096 + 512 + 3], "a b", "inside a member"),
    "cut at a sample boundary": (WHOLE[:4096], "a b", "no end-of-archive marker"),
    "cut inside a header": (WHOLE[: 4096 + 100], "a b", "header cut after 100 bytes"),
    "cut between c.jpg and c.txt": (WHOLE[: 4096 + 1024], "a b", "no end-of-archive marker"),
    "cut inside c.txt": (WHOLE[: 4096 + 1536 + 2], "a b", "inside a member"),
    "end blocks missing": (WHOLE[:10240], "a b c d e", "no end-of-archive marker"),
    "corrupt header mid-file": (flip(WHOLE, 2048, b"\xff"), "a", "no tar header"),
    "absurd size field": (flip(WHOLE, SIZE_FIELD, b"77777777777\0"), "a", "no tar header"),
    "corrupt first header": (flip(WHOLE, 0, b"\xff"), "", "no tar header"),
    "an HTML page": (b"<!DOCTYPE html><html>" + b" " * 2000, "", "<!DOCTYPE"),
    "a short HTML page": (b"<html>404</html>", "", "header cut"),
    "an empty file": (b"", "", "the file is empty"),
    "a hole of zeros": (flip(WHOLE, 4096, b"\0" * 2048), "a b", "hole of zeros"),
    "two tars joined": (WHOLE + WHOLE, "a b c d e", "joined tars"),
    "a zeroed tail": (flip(WHOLE + b"\0" * 10240, 4096, b"\0" * 6144), "a b", "zero bytes at the"),
    "a ragged tail": (WHOLE + b"\0" * 100, "a b c d e", "inside a block"),
    "gzip cut": (gzip.compress(WHOLE)[:-30], None, "reading failed"),
    "gzip with a wrong CRC": (
        flip(gzip.compress(WHOLE), len(gzip.compress(WHOLE)) - 8, b"0000"),
        "a b c d e",
        "CRC",
    ),
    "bzip2 cut": (bz2.compress(WHOLE)[:-10], None, "reading failed"),
    "xz cut": (lzma.compress(WHOLE)[:-30], None, "reading failed"),
    "zstd cut": (zstd(WHOLE)[:-20], None, ""),
    "zstd garbage": (zstd(WHOLE)[:9] + b"\xff" * 90, "", "reading failed"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_is_told_after_every_whole_sample(path: Path, what: str) -> None:
    data, wanted, message = DAMAGED[what]
    samples, error = read(path, data)
    assert error is not None
    assert message in str(error)
    if wanted is not None:
        assert keys(samples) == wanted
    for sample in samples:
        assert sample.data == f"{sample.ref.key}jpg".encode()
        assert sample.fields == {"txt": f"{sample.ref.key}txt".encode()}


def test_the_image_before_a_cut_comes_if_no_field_is_asked_for(path: Path) -> None:
    cut = WHOLE[: 4096 + 1024]  # between c.jpg and c.txt
    stats = ShardStats()
    assert keys(read(path, cut, fields=frozenset())[0]) == "a b c"
    assert keys(read(path, cut, fields=frozenset({"txt"}), stats=stats)[0]) == "a b"
    assert stats.num_withheld == 1
    assert stats.num_images == 3


def test_only_an_image_that_may_lack_fields_is_withheld(path: Path) -> None:
    images = make_tar_bytes([("a.jpg", b"a"), ("b.jpg", b"b"), ("c.jpg", b"c")])
    wants_txt: dict[str, Any] = {"fields": frozenset({"txt"})}
    assert keys(read(path, images[: 2048 + 514], **wants_txt)[0]) == "a b"  # inside c: b is over
    assert keys(read(path, images[:2048], **wants_txt)[0]) == "a"  # b.txt might have followed
    assert keys(read(path, images[:2048])[0]) == "a b"  # no sample here has fields


def test_a_lenient_end_forgives_a_missing_marker_and_a_long_tail(path: Path) -> None:
    for data in (WHOLE[:10240], WHOLE + b"\0" * 40_960):
        assert read(path, data)[1] is not None
        samples, error = read(path, data, has_lenient_end=True)
        assert error is None
        assert keys(samples) == "a b c d e"
    assert read(path, WHOLE[:10_000], has_lenient_end=True)[1] is not None


@pytest.mark.parametrize(
    "data", [make_tar_bytes([]), make_tar_bytes([])[:1024]], ids=["padded", "two blocks"]
)
def test_an_empty_tar_is_whole(path: Path, data: bytes) -> None:
    assert read(path, data) == ([], None)


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, bz2.compress, lzma.compress, zstd, two_gzips],
    ids=["gzip", "bzip2", "xz", "zstd", "gzip of two members"],
)
def test_compression_is_told_by_the_first_bytes(path: Path, compress: Any) -> None:
    samples, error = read(path, compress(WHOLE))
    assert error is None
    assert keys(samples) == "a b c d e"


def test_zstd_without_its_package_is_a_clear_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    _, error = read(path, zstd(WHOLE))
    assert error is not None
    assert "captionjob[zstd]" in str(error)


def test_a_tar_cut_at_any_byte_is_told_or_gives_all_samples(path: Path) -> None:
    tar = make_tar_bytes([(name, data) for name, data in TRUTH[:4]])
    path.write_bytes(tar)
    for cut in reversed(range(len(tar))):
        os.truncate(path, cut)  # much cheaper than ten thousand files
        samples: list[Sample] = []
        is_told = False
        try:
            samples.extend(read_shard(Shard("x", str(path))))
        except ShardError:
            is_told = True
        assert is_told or len(samples) == 2, cut
        assert all(s.fields == {"txt": f"{s.ref.key}txt".encode()} for s in samples), cut


@pytest.mark.parametrize("what", ["cut at a sample boundary", "a hole of zeros"])
def test_tarfile_alone_takes_damage_for_the_end(what: str) -> None:
    """The mistake that this reader is there to avoid: nothing is said, and samples are lost."""
    with tarfile.open(fileobj=io.BytesIO(DAMAGED[what][0]), mode="r|") as tar:
        assert [info.name for info in tar] == ["a.jpg", "a.txt", "b.jpg", "b.txt"]


@settings(max_examples=300, deadline=None)
@given(
    member=st.integers(0, len(TRUTH) - 1),
    flips=st.dictionaries(st.integers(0, 511), st.integers(1, 255), min_size=1, max_size=4),
)
def test_changed_header_bytes_are_told_or_change_no_sample(
    tmp_path_factory: pytest.TempPathFactory, member: int, flips: dict[int, int]
) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips.items():
        data[member * 1024 + place] ^= mask
    path = tmp_path_factory.getbasetemp() / "flipped.tar"
    samples, error = read(path, bytes(data))
    if error is None:  # a sum of changes may keep the checksum, if several bytes change
        assert len(flips) > 1 or keys(samples) == "a b c d e"
        assert len(samples) >= 4


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=3000), cut=st.integers(0, len(WHOLE)))
def test_no_bytes_are_more_than_a_shard_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.tar"
    for head in (b"", b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"):
        read(path, head + data)
    read(path, WHOLE[:cut] + data)


# --- what a whole shard may hold ---


def test_keys_with_dots_keep_their_image(path: Path) -> None:
    samples = whole(
        path,
        [("a.b.jpg", b"1"), ("a.b.txt", b"t"), ("a.b.meta.json", b"{}"), ("d.v1/c.jpg", b"2")],
    )
    assert [(s.ref.key, s.ref.member) for s in samples] == [
        ("a.b", "a.b.jpg"),
        ("d.v1/c", "d.v1/c.jpg"),
    ]
    assert samples[0].fields == {"txt": b"t", "meta.json": b"{}"}


def test_numbered_images_are_samples_of_their_own(path: Path) -> None:
    samples = whole(path, [("img.1.jpg", b"1"), ("img.2.jpg", b"2"), ("img.2.txt", b"t")])
    assert keys(samples) == "img.1 img.2"
    assert [dict(s.fields) for s in samples] == [{}, {"txt": b"t"}]


def test_capital_extensions_are_extensions(path: Path) -> None:
    samples = whole(
        path,
        [("A.JPG", b"1"), ("A.TXT", b"t"), ("b.jpg", b"2"), ("b.JPG", b"3"), ("c.JpEg", b"4")],
    )
    assert keys(samples) == "A b b c"
    assert samples[0].fields == {"txt": b"t"}


def test_several_images_of_a_key_are_rows_that_share_fields(path: Path) -> None:
    samples = whole(path, [("a.json", b"{}"), ("a.jpg", b"1"), ("a.png", b"2"), ("a.txt", b"t")])
    assert [s.ref.member for s in samples] == ["a.jpg", "a.png"]
    assert all(s.fields == {"json": b"{}", "txt": b"t"} for s in samples)


@pytest.mark.parametrize("order", ["image first", "field first"])
def test_a_key_that_comes_again_is_two_samples_each_with_its_own_fields(
    path: Path, order: str
) -> None:
    pairs = [[("a.jpg", b"1"), ("a.txt", b"t1")], [("a.jpg", b"2"), ("a.txt", b"t2")]]
    if order == "field first":
        pairs = [pair[::-1] for pair in pairs]
    samples = whole(path, [member for pair in pairs for member in pair])
    assert [(s.data, s.fields["txt"]) for s in samples] == [(b"1", b"t1"), (b"2", b"t2")]


def test_the_same_image_twice_in_a_row_is_two_rows(path: Path) -> None:
    samples = whole(path, [("b.jpg", b"1"), ("b.jpg", b"2"), ("b.txt", b"t"), ("c.jpg", b"3")])
    assert [s.data for s in samples] == [b"1", b"2", b"3"]


def test_interleaved_members_lose_no_image(path: Path) -> None:
    stats = ShardStats()
    tar = make_tar_bytes([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"t"), ("b.txt", b"u")])
    samples, error = read(path, tar, stats=stats)
    assert error is None
    assert keys(samples) == "a b"
    assert samples[1].fields == {"txt": b"u"}
    assert stats.junk == {"field without an image": 1}


def test_a_field_before_a_longer_key_goes_to_the_longer_key(path: Path) -> None:
    samples = whole(path, [("a.jpg", b"1"), ("a.b.txt", b"t"), ("a.b.jpg", b"2")])
    assert samples[1].fields == {"txt": b"t"}


def test_junk_is_skipped_and_counted(path: Path) -> None:
    fifo = tarfile.TarInfo("pipe.jpg")
    fifo.type = tarfile.FIFOTYPE
    folder = tarfile.TarInfo("folder.jpg")
    folder.type = tarfile.DIRTYPE
    stats = ShardStats()
    members: list[tuple[str | tarfile.TarInfo, bytes]] = [
        (folder, b""),
        (fifo, b""),
        ("._a.jpg", b"x"),
        (".DS_Store", b"x"),
        ("__MACOSX/._a.jpg", b"x"),
        ("__MACOSX/a.jpg", b"x"),
        ("dir/._b.jpg", b"x"),
        (".hidden/b.jpg", b"x"),
        ("README", b"read me"),
        ("lonely.txt", b"x"),
        ("a.jpg", b"x"),
    ]
    samples, error = read(path, make_tar_bytes(members), stats=stats)
    assert error is None
    assert keys(samples) == "a"
    assert stats.junk == {
        "folder": 1,
        "special": 1,
        "dot file": 4,
        "__MACOSX": 2,
        "no extension": 1,
        "field without an image": 1,
    }
    assert (stats.num_images, stats.num_samples) == (1, 1)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA"])
def test_a_member_without_extension_is_an_image_if_its_bytes_are(path: Path, format: str) -> None:
    data = make_image_bytes(format)
    (sample,) = whole(path, [("dir.x/photo", data), ("dir.x/photo.txt", b"t"), ("notes", b"BMW")])
    assert sample.ref.key == sample.ref.member == "dir.x/photo"
    assert sample.data == data
    assert sample.fields == {"txt": b"t"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_is_a_row_with_a_clear_error(path: Path, kind: bytes) -> None:
    samples = whole(path, [("a.jpg", b"1"), link("b.jpg", "a.jpg", kind), ("b.txt", b"t")])
    assert keys(samples) == "a b"
    fault = samples[1].fault
    assert fault is not None
    assert fault.code == "link"
    assert "a.jpg" in fault.detail
    assert samples[1].fields == {"txt": b"t"}


def test_a_zero_length_image_is_a_sample(path: Path) -> None:
    (sample,) = whole(path, [("a.jpg", b"")])
    assert sample.data == b""


LONG = "folder/" * 30 + "n" * 120


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_are_read(path: Path, format: int) -> None:
    names = [f"{LONG}.jpg", "日本語/é.jpg", "./plain.jpg"]
    tar = make_tar_bytes([(name, b"x") for name in names], format=format)
    samples, error = read(path, tar)
    assert error is None
    assert [s.ref.member for s in samples] == names
    assert [s.ref.key for s in samples] == [LONG, "日本語/é", "plain"]


def test_pax_sizes_and_global_headers_are_honoured(path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"comment": "one", "mtime": "1.5"}
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}
    ) as tar:
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    samples, error = read(path, buffer.getvalue())
    assert error is None
    assert samples[0].data == b"abc"


def test_a_name_that_is_no_utf8_is_spelled_out(path: Path) -> None:
    tar = make_tar_bytes([("caf\udce9.jpg", b"x")], format=tarfile.GNU_FORMAT)
    (sample,), error = read(path, tar)
    assert error is None
    assert sample.ref.member == "caf\\xe9.jpg"
    sample.ref.member.encode()


def test_a_sparse_member_is_a_row_and_what_follows_is_read(path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.name": "real.jpg",
        "GNU.sparse.realsize": "9",
    }
    samples = whole(path, [(info, b"0" * 512), ("b.jpg", b"x")])
    assert [s.ref.member for s in samples] == ["real.jpg", "b.jpg"]
    assert samples[0].fault is not None
    assert samples[0].fault.code == "unsupported"


def test_a_member_over_the_limit_costs_a_row_and_no_memory(path: Path) -> None:
    tar = make_tar_bytes([("a.jpg", b"x" * 3000), ("a.txt", b"y" * 3000), ("b.jpg", b"x")])
    stats = ShardStats()
    samples, error = read(path, tar, max_member_bytes=2000, max_field_bytes=2000, stats=stats)
    assert error is None
    assert samples[0].fault is not None
    assert samples[0].fault.code == "too_large"
    assert samples[0].data == b""
    assert samples[1].data == b"x"
    assert stats.junk == {"field: over the size limit": 1}


def test_an_absurd_size_with_a_right_checksum_is_damage(path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = 1 << 60
    header = info.tobuf(tarfile.GNU_FORMAT)
    _, error = read(path, header + b"\0" * 4096)
    assert error is not None
    assert "inside a member" in str(error)
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    _, error = read(path, info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 4096)
    assert error is not None
    assert "an extended header of" in str(error)


def test_fields_that_nobody_asks_for_are_not_kept(path: Path) -> None:
    members = [("a.json", b"{}"), ("a.jpg", b"x"), ("a.meta.json", b"[]"), ("a.txt", b"t")]
    tar = make_tar_bytes([*members])
    stats = ShardStats()
    (sample,), _ = read(path, tar, fields=frozenset({"txt"}), stats=stats)
    assert sample.fields == {"txt": b"t"}
    (sample,), _ = read(path, tar, fields=frozenset())
    assert sample.fields == {}
    assert stats.junk == {}


def test_skipped_samples_keep_their_index_and_take_no_memory(path: Path) -> None:
    stats = ShardStats()
    samples, error = read(path, WHOLE, skip={0, 1, 3}, stats=stats)
    assert error is None
    assert [(s.ref.index, s.ref.key, s.fields["txt"]) for s in samples] == [
        (2, "c", b"ctxt"),
        (4, "e", b"etxt"),
    ]
    assert (stats.num_images, stats.num_samples, stats.num_skipped) == (5, 2, 3)
    assert stats.bytes_read == len(WHOLE)


def test_a_shard_is_never_held_in_memory(path: Path) -> None:
    path.write_bytes(make_tar_bytes([(f"{i:03d}.jpg", bytes(1 << 19)) for i in range(60)]))
    stats = ShardStats()
    tracemalloc.start()
    for _ in read_shard(Shard("x", str(path)), stats=stats):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
    assert stats.bytes_read > 30 << 20


def test_duplicates_without_end_do_not_pile_up(path: Path) -> None:
    members = [("a.jpg", b"1")] * 100 + [(f"a.{i}.txt", bytes(10)) for i in range(1000)]
    stats = ShardStats()
    samples, error = read(path, make_tar_bytes(members), stats=stats)
    assert error is None
    assert len(samples) == 100
    assert len(samples[-1].fields) <= 256


def test_leaving_early_closes_the_file(path: Path) -> None:
    path.write_bytes(WHOLE)
    samples = read_shard(Shard("x", str(path)))
    assert next(samples).ref.key == "a"
    samples.close()  # type: ignore[attr-defined]


def test_the_header_parser_of_tarfile_is_as_the_reader_needs_it() -> None:
    """The one part of tarfile that is used: it must raise on each changed byte."""
    block = WHOLE[:512]
    info = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
    assert (info.name, info.size) == ("a.jpg", 4)
    for place in (0, 124, 156, 257, 345):
        with pytest.raises(tarfile.HeaderError):
            tarfile.TarInfo.frombuf(flip(block, place, b"\x77"), "utf-8", "backslashreplace")


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_disk_that_fails_is_a_shard_error_wherever_it_fails(
    monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    class FailingFile(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            if self.tell() >= num_good * 1024:
                raise OSError(5, "Input/output error")
            return super().readinto(memoryview(buffer)[:1024])

    monkeypatch.setattr(reader, "open_shard", lambda _: FailingFile(WHOLE))
    with pytest.raises(ShardError, match=r"reading failed: .*Input/output error"):
        list(read_shard(Shard("x", "/x.tar")))
