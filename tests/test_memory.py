"""Memory is bounded by settings, not by what pictures or shards hold."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import platform
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jobs.feed import Preparer
from pipeline.backends.scripted import ScriptedCaptioner, ScriptedSettings
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.fixtures import make_image_bytes, make_shard, make_tar_bytes
from pipeline.freed_memory import give_back_freed_memory
from pipeline.images.opening import ImageSettings
from pipeline.images.pixel_room import PixelRoom, bytes_to_open
from pipeline.prefetch import Prefetcher, PrefetchLimits
from pipeline.prompts import PromptTemplate
from pipeline.records import Request, Sample, SampleRef
from tests.commands import environment

MB = 1 << 20


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


# --- the room that open pictures share ---


@settings(max_examples=25, deadline=None)
@given(
    claims=st.lists(st.integers(0, 150), min_size=1, max_size=30),
    num_threads=st.integers(1, 5),
)
def test_claims_together_never_pass_the_limit_unless_one_does_alone(
    claims: list[int], num_threads: int
) -> None:
    room = PixelRoom(100)
    live: list[int] = []
    worst: list[tuple[int, ...]] = []
    lock = threading.Lock()

    def visit(size: int) -> int:
        with room.visit() as claim:
            claim(size)
            with lock:
                live.append(size)
                worst.append(tuple(live))
            time.sleep(0.0002)
            with lock:
                live.remove(size)
        return size

    with Prefetcher(claims, visit, PrefetchLimits(num_threads)) as ahead:
        assert list(ahead) == claims
    for together in worst:
        assert sum(together) <= 100 or len([size for size in together if size]) == 1
    assert room.peak_bytes <= max(100, *claims)


def test_an_error_gives_the_room_back() -> None:
    room = PixelRoom(100)

    def visit() -> None:
        with room.visit() as claim:
            claim(90)
            raise ValueError("broken")

    for _ in range(3):
        with pytest.raises(ValueError, match="broken"):
            visit()
    assert room.peak_bytes == 90


def test_a_second_claim_of_a_visit_waits_for_nobody() -> None:
    room = PixelRoom(100)
    with room.visit() as claim:
        claim(80)
        claim(80)
    assert room.peak_bytes == 160


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_pixels_count_not_file_bytes(format: str) -> None:
    data = encoded(Image.new("RGB", (2000, 1000), "white"), format)
    assert len(data) < 100_000
    room = PixelRoom()
    captioner = ScriptedCaptioner(ScriptedSettings(), SamplingSettings(), SpeedSettings())
    prepare = Preparer(captioner, PromptTemplate("Say it."), ImageSettings(), (), 1, room)
    assert isinstance(prepare(Sample(SampleRef("s", 0, "a", "a.jpg"), data)), Request)
    assert room.peak_bytes >= 2000 * 1000 * 12


@pytest.mark.parametrize(
    ("mode", "bytes_a_pixel"), [("L", 12), ("RGB", 12), ("CMYK", 12), ("RGBA", 24), ("F", 24)]
)
def test_a_pixel_is_weighed_by_its_way_to_rgb(mode: str, bytes_a_pixel: int) -> None:
    assert bytes_to_open(Image.new(mode, (10, 10))) == 100 * bytes_a_pixel


# --- whole runs, in processes of their own ---


MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def glibc() -> bool:
    return sys.platform == "linux" and bool(platform.libc_ver()[0])


def peak_mb(*arguments: str, cwd: Path) -> float:
    """Run `captionjob` and return the most memory that it had, in MB.

    From a small process between: what is forked from this large one would begin with its peak.
    """
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "jobs", *arguments]
    printed = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=True
    )
    code, kilobytes = (int(part) for part in printed.stdout.split())
    assert code == 0
    return kilobytes / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_huge_pictures_in_a_row_on_eight_threads_are_not_open_all_at_once(tmp_path: Path) -> None:
    """Ten of 40 million pixels: 320 MB each while it is opened, and so 2.5 GB if nobody waited."""
    data = encoded(Image.new("RGB", (8000, 5000), (90, 120, 200)), "JPEG")
    make_shard(tmp_path / "a.tar", [(f"{i}.jpg", data) for i in range(10)])
    run = ("run", "--shards", "a.tar", "--out", "out", "--model", "scripted")
    assert peak_mb(*run, "--loader-workers", "8", cwd=tmp_path) < 1300


def test_freed_memory_is_given_back_where_the_c_library_can() -> None:
    code = "from pipeline.freed_memory import give_back_freed_memory as f; print(f())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in ("True", "False")
    assert callable(give_back_freed_memory)


@pytest.mark.skipif(not glibc(), reason="another C library")
def test_what_is_free_now_can_be_given_back() -> None:
    code = """
from pathlib import Path
from pipeline.freed_memory import trim
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
kept, freed = [], [bytearray(b"x" * 60_000) for _ in range(2000)]
kept.append(bytearray(b"x" * 60_000))  # above the others, so that the heap does not shrink alone
before = resident()
freed.clear()
trim()
print(before - resident())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 80 * MB


# --- bombs ---

READ_WITH_LITTLE_MEMORY = """
import resource, sys
import bz2, gzip, lzma, zstandard
from pipeline.errors import ShardError
from pipeline.images.opening import facts_of, open_sample
from pipeline.errors import SampleError
from pipeline.input.reader import ReaderSettings, read_shard
from pipeline.records import Shard

max_member_bytes, room = int(sys.argv[2]), int(sys.argv[3])
facts_of(b"\\x89PNG\\r\\n\\x1a\\n")  # imports all that there is to import
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
try:
    for sample in read_shard(Shard("x", sys.argv[1]), ReaderSettings(None, max_member_bytes)):
        facts_of(sample.data)
        try:
            open_sample(sample)
            print(sample.ref.key, "ok")
        except SampleError as error:
            print(sample.ref.key, error.code)
except ShardError as error:
    print("shard", error.detail)
"""


def read_with_little_memory(path: Path, max_member_mb: int, room_mb: int = 64) -> list[str]:
    """Read and open a shard in a process that may take `room_mb` more than its imports."""
    sizes = (str(max_member_mb * MB), str(room_mb * MB))
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_LITTLE_MEMORY, str(path), *sizes],
        env=environment({"OPENBLAS_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def zeros_shard(size: int) -> bytes:
    """Return a tar with a field and an image of zeros, and a picture behind them."""
    picture = make_image_bytes()
    members = [("a.txt", bytes(size)), ("a.jpg", bytes(size)), ("b.jpg", picture)]
    return make_tar_bytes([*members])


PACKERS = {
    "gzip": lambda data: gzip.compress(data, 1),
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")


@needs_limits
@pytest.mark.parametrize("packer", PACKERS)
def test_a_packed_bomb_streams_through_little_memory(tmp_path: Path, packer: str) -> None:
    path = tmp_path / "bomb.tar"
    path.write_bytes(PACKERS[packer](zeros_shard(80 * MB)))
    assert path.stat().st_size < 2 * MB
    assert read_with_little_memory(path, max_member_mb=20) == ["a too_large", "b ok"]


@needs_limits
def test_a_member_that_no_memory_is_left_for_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tar"
    path.write_bytes(PACKERS["zstd"](zeros_shard(300 * MB)))
    assert read_with_little_memory(path, max_member_mb=512) == ["a too_large", "b ok"]


@needs_limits
def test_an_absurd_size_in_a_short_shard_takes_no_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = 500 * MB
    path = tmp_path / "short.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(5000))
    (line,) = read_with_little_memory(path, max_member_mb=512)
    assert "inside a member" in line


def png_with(kind: bytes, before: bytes, packed: bytes) -> bytes:
    """Return a small PNG with a chunk before its pixels."""
    body = kind + before + packed
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    data = make_image_bytes("PNG")
    return data[:33] + chunk + data[33:]


@needs_limits
def test_what_pictures_carry_in_packed_chunks_takes_no_memory(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(100 * MB), 1)
    kinds = {b"iCCP": b"x\0\0", b"zTXt": b"x\0\0", b"iTXt": b"x\0\1\0\0\0"}
    members = [(f"{kind.decode()}.png", png_with(kind, kinds[kind], packed)) for kind in kinds]
    lines = read_with_little_memory(Path(make_shard(tmp_path / "a.tar", members)), 20)
    assert [line.split()[0] for line in lines] == ["iCCP", "zTXt", "iTXt"]
    assert {line.split()[1] for line in lines} <= {"ok", "unreadable"}
