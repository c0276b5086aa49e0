"""Reading ahead gives the bytes of the file, whatever is skipped, and jumps where it can."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ShardError
from pipeline.fixtures import make_tar_bytes
from pipeline.input import read_ahead
from pipeline.input.read_ahead import ReadAhead
from pipeline.input.reader import ShardStats, read_shard
from pipeline.records import Sample, Shard

DATA = bytes(range(256)) * 40
TAR = make_tar_bytes(
    [(f"{i}.{kind}", bytes([i]) * 700) for i in range(6) for kind in ("jpg", "txt")]
)


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False


class Everything:
    def __contains__(self, index: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gulps and jumps of a size that small files have."""
    monkeypatch.setattr(read_ahead, "FIRST_BYTES", 16)
    monkeypatch.setattr(read_ahead, "MAX_BYTES", 256)
    monkeypatch.setattr(read_ahead, "MIN_JUMP", 64)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 900)), max_size=30), st.booleans())
def test_what_is_read_and_skipped_are_the_files_bytes_in_order(
    steps: list[tuple[bool, int]], can_seek: bool
) -> None:
    jumps: list[int] = []
    file = ReadAhead((io.BytesIO if can_seek else Unseekable)(DATA), jumps.append)
    at = 0
    for is_skip, size in steps:
        wanted = DATA[at : at + size]
        assert file.peek(6) == DATA[at : at + 6]
        if is_skip:
            assert file.skip(size) == len(wanted)
        else:
            assert file.read(size) == wanted
        at += len(wanted)
    assert file.read() == DATA[at:]
    assert can_seek or not jumps


def read(path: Path, stats: ShardStats) -> Iterator[Sample]:
    return read_shard(Shard("x", str(path)), skip=Everything(), stats=stats)


def test_unwanted_images_are_sought_past(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar_bytes([(f"{i}.jpg", bytes(20_000)) for i in range(8)]))
    stats = ShardStats()
    assert list(read(path, stats)) == []
    assert stats.num_images == stats.num_skipped == 8
    assert stats.bytes_read < path.stat().st_size / 5
    assert stats.bytes_passed == path.stat().st_size


@pytest.mark.parametrize("end", range(0, len(TAR), 97))
def test_a_cut_is_found_behind_what_was_sought_past(tmp_path: Path, end: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(TAR[:end])
    is_whole = not any(TAR[end:]) and end % 512 == 0 and end >= 12 * 1536 + 512
    try:
        list(read(path, ShardStats()))
    except ShardError:
        assert not is_whole
    else:
        assert is_whole
