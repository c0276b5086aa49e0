"""Shards fetched ahead: the same bytes, within a bound, and nothing left."""

from __future__ import annotations

import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config import RunConfig
from jobs.run import Run
from pipeline.errors import RequestError, ShardError
from pipeline.fixtures import make_photo_shard
from pipeline.input.identity import stamp_of
from pipeline.records import Shard
from pipeline.remote import spool as spooling
from pipeline.remote.spool import Spool, SpoolSettings
from tests.commands import captionjob
from tests.remote.fault_server import Fault, Store

pytest.importorskip("urllib3")

DATA = random.Random(3).randbytes(400_000)
SEGMENT = 50_000


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(spooling, "CHUNK", 10_000)


@pytest.fixture
def shards(store: Store) -> list[Shard]:
    for place in range(4):
        store.objects[f"/{place}.tar"] = DATA[place:]
    return [Shard(str(place), f"{store.url}/{place}.tar") for place in range(4)]


@pytest.fixture
def make(tmp_path: Path, shards: list[Shard]) -> Iterator[Callable[[int, int], Spool]]:
    """A spool of so many bytes for so many shards at once, closed at the end."""
    made: list[Spool] = []

    def one(max_bytes: int, max_shards: int = 2) -> Spool:
        made.append(Spool(SpoolSettings(tmp_path, max_bytes, max_shards), shards))
        made[-1].start()
        return made[-1]

    yield one
    for spool in made:
        spool.close()


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def read(spool: Spool, shard: Shard) -> bytes:
    file = spool.open(shard)
    assert file is not None
    with io.BufferedReader(file, 7000) as buffered:  # type: ignore[arg-type]
        return buffered.read()


@pytest.mark.parametrize("max_bytes", [SEGMENT, 3 * SEGMENT, 10 * len(DATA)])
def test_shards_come_from_the_spool_byte_for_byte_and_it_holds_no_more_than_it_may(
    make: Callable[[int], Spool], shards: list[Shard], max_bytes: int
) -> None:
    spool = make(max_bytes)
    most = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            most[0] = max(most[0], spool.num_held)

    threading.Thread(target=watch, daemon=True).start()
    for place, shard in enumerate(shards):
        assert read(spool, shard) == DATA[place:]
    is_over.set()
    assert 0 < most[0] <= max_bytes + SEGMENT + spooling.CHUNK
    assert spool.num_held == 0


def test_the_next_shard_is_fetched_while_this_one_is_read(
    make: Callable[[int], Spool], shards: list[Shard], store: Store
) -> None:
    spool = make(10 * len(DATA))
    file = spool.open(shards[0])
    assert file is not None
    with file:
        assert file.read(10) == DATA[:10]
        until(lambda: spool.num_held >= 2 * len(DATA) - 1 - SEGMENT)
        assert not any("/2.tar" in asked for asked in store.asked)
    until(lambda: any("/2.tar" in asked for asked in store.asked))


def test_files_have_no_name_so_nothing_can_be_left(
    make: Callable[[int], Spool], tmp_path: Path
) -> None:
    spool = make(10 * len(DATA))
    until(lambda: spool.num_held > len(DATA))
    assert os.listdir(tmp_path) == []
    spool.close()
    assert spool.num_held == 0


def test_an_object_that_was_replaced_since_is_not_taken_from_the_spool(
    make: Callable[[int], Spool], shards: list[Shard], store: Store
) -> None:
    spool = make(10 * len(DATA))
    until(lambda: spool.num_held > len(DATA))
    before = stamp_of(shards[0])
    store.objects["/0.tar"] = DATA[::-1]
    assert spool.open(shards[0], stamp_of(shards[0])) is None
    assert before != stamp_of(shards[0])
    assert read(spool, shards[1]) == DATA[1:]


def test_a_shard_that_is_not_wanted_makes_room_for_the_next(
    make: Callable[[int], Spool], shards: list[Shard], store: Store
) -> None:
    spool = make(10 * len(DATA))
    spool.skip(shards[2])
    spool.skip(shards[0])
    assert read(spool, shards[1]) == DATA[1:]
    assert read(spool, shards[3]) == DATA[3:]
    assert not any("/2.tar" in asked for asked in store.asked)
    assert read(spool, shards[0]) == DATA, "what nobody announced is fetched when it is asked for"


def test_what_came_before_a_failure_is_given_before_the_failure(
    make: Callable[[int, int], Spool], shards: list[Shard], store: Store
) -> None:
    store.schedule = [None, Fault("cut", 123_000), *[Fault("cut", 0)] * 3]
    spool = make(10 * len(DATA), 1)
    file = spool.open(shards[0])
    assert file is not None
    with file:
        got = b""
        while len(got) < 123_000:
            got += file.read(1000)
        assert got == DATA[:123_000]
        with pytest.raises(ShardError, match="attempt 4 of 4"):
            file.read(1)


def test_a_shard_that_cannot_be_fetched_is_opened_anew_for_its_error(
    make: Callable[[int, int], Spool], shards: list[Shard], store: Store
) -> None:
    del store.objects["/0.tar"]
    spool = make(10 * len(DATA), 1)
    assert spool.open(shards[0]) is None


def test_a_full_disk_is_a_shard_error(
    make: Callable[[int, int], Spool], shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spooling.os, "pwrite", full)
    spool = make(10 * len(DATA), 1)
    with pytest.raises(ShardError, match=r"the spool .* failed: No space left on device"):
        read(spool, shards[0])


def test_settings_that_cannot_work_are_refused_by_their_option(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--spool-bytes 9: wanted"):
        SpoolSettings(tmp_path, 9)
    with pytest.raises(RequestError, match="--spool-shards 0"):
        SpoolSettings(tmp_path, 1 << 30, 0)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="wanted a folder for files"):
        SpoolSettings(tmp_path / "file" / "below").check()


def test_a_run_with_a_spool_makes_the_same_files_and_waits_less_for_a_slow_store(
    store: Store, tmp_path: Path
) -> None:
    for place in range(4):
        made = make_photo_shard(tmp_path / f"{place}.tar", 20, seed=place)
        store.objects[f"/{place}.tar"] = Path(made).read_bytes()
    store.bytes_per_second = 250_000.0
    url = f"{store.url}/{{0..3}}.tar"
    plain = RunConfig(shards=(url,), out=tmp_path / "plain", model="scripted")
    settings = SpoolSettings(tmp_path / "spool", max_shards=4)
    spooled = replace(plain, out=tmp_path / "out", spool=settings)
    seconds = []
    for config in (plain, spooled):
        began = time.monotonic()
        assert Run(config).run().exit_code == 0
        seconds.append(time.monotonic() - began)
    assert seconds[1] < 0.8 * seconds[0]
    for path in (tmp_path / "plain").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert os.listdir(tmp_path / "spool") == []


def test_the_options_reach_the_spool(store: Store, tmp_path: Path) -> None:
    made = make_photo_shard(tmp_path / "0.tar", 3)
    store.objects["/0.tar"] = Path(made).read_bytes()
    words = ["run", "--shards", f"{store.url}/0.tar", "--out", "out", "--model", "scripted"]
    bad = captionjob(*words, "--spool", "s", "--spool-bytes", "1", cwd=tmp_path)
    assert bad.returncode == 2
    assert "--spool-bytes 1: wanted" in bad.stderr
    good = captionjob(*words, "--spool", "s", "--spool-shards", "1", cwd=tmp_path)
    assert good.returncode == 0
    assert (tmp_path / "s").is_dir()
