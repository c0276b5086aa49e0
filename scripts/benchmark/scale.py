"""A long job of many small pictures: images a second and resident memory, stretch by stretch.

The real command runs in a process of its own; how far it is comes from its throughput file, and
what it holds from /proc, so this runs on Linux. The first stretch warms up and is shown, but the
later ones are held against the second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.fixtures import make_image_bytes, make_tar_bytes
from scripts.benchmark.default_model import ROOT

POLL_SECONDS = 0.5
SHARD_SAMPLES = 1000
SIZES = ((96, 64), (64, 96), (128, 96), (80, 80))


@dataclass(frozen=True, slots=True)
class Moment:
    """What was seen at one look."""

    wall: float  # seconds of captioning
    cpu: float  # the same of the processor, all threads
    images: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many images of the job."""

    images: int  # at its end
    per_second: float
    per_cpu_second: float
    rss_mib: float  # at its end


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, print a line a stretch and, last, one line of JSON."""
    parser = argparse.ArgumentParser(prog="scripts/scale", description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=2_000, help="images of a stretch")
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=("wall", "cpu"),
        help="cpu: seconds of the processor, where others use it too",
    )
    parser.add_argument("--max-growth", type=float, default=0.15, help="of memory, as a share")
    parser.add_argument("--max-slowdown", type=float, default=0.15, help="as a share")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="captionjob-scale-") as name:
        write_shards(Path(name) / "shards", asked.images)
        moments = watch(Path(name), asked.model)
        stretches = list(cut(moments, asked.every))
    for one in stretches:
        print(
            f"{one.images:7,} images  {one.per_second:7.1f} a second  "
            f"{one.per_cpu_second:7.1f} a processor's second  {one.rss_mib:6.0f} MiB",
            flush=True,
        )
    growth, slowdown = compare(stretches, asked.clock)
    is_flat = growth <= asked.max_growth and slowdown <= asked.max_slowdown
    print(json.dumps({
        "model": asked.model,
        "clock": asked.clock,
        "images": stretches[-1].images,
        "images_per_second": [round(one.per_second, 2) for one in stretches],
        "images_per_cpu_second": [round(one.per_cpu_second, 2) for one in stretches],
        "rss_mib": [round(one.rss_mib) for one in stretches],
        "growth": round(growth, 4),
        "slowdown": round(slowdown, 4),
        "is_flat": is_flat,
    }))  # fmt: skip
    return 0 if is_flat else 1


def write_shards(folder: Path, num_images: int) -> None:
    """Write shards of small pictures, no two alike."""
    folder.mkdir()
    for begin in range(0, num_images, SHARD_SAMPLES):
        members = [
            (f"{number:06d}.jpg", _picture(number))
            for number in range(begin, min(begin + SHARD_SAMPLES, num_images))
        ]
        (folder / f"{begin // SHARD_SAMPLES:05d}.tar").write_bytes(make_tar_bytes(members))


def _picture(number: int) -> bytes:
    width, height = SIZES[number % len(SIZES)]
    return make_image_bytes(width=width, height=height, seed=number)


def watch(folder: Path, model: str) -> list[Moment]:
    """Run the command, and look at it until it ends; SystemExit if it fails."""
    command = [
        *(sys.executable, "-m", "jobs", "run", "--model", model),
        *("--shards", str(folder / "shards"), "--out", str(folder / "out")),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    moments: list[Moment] = []
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            look = _look(folder / "out", process.pid)
            if look is not None and (not moments or look.wall > moments[-1].wall):
                moments.append(look)
                print(f"{look.images:.0f} images, {look.rss_mib:.0f} MiB", file=sys.stderr)
    finally:
        process.kill()
    if process.wait():
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    end = _look(folder / "out")
    if not moments or end is None:
        sys.exit("the job was over before it could be looked at; wanted more --images")
    return [*moments, replace(end, rss_mib=moments[-1].rss_mib)]


def cut(moments: Sequence[Moment], every: int) -> Iterator[Stretch]:
    """Yield the stretches of `every` images, their ends between two looks."""
    begin = before = Moment(0.0, 0.0, 0.0, 0.0)
    wanted = every
    for moment in moments:
        while moment.images >= wanted:
            share = (wanted - before.images) / (moment.images - before.images)
            wall = before.wall + share * (moment.wall - before.wall)
            cpu = before.cpu + share * (moment.cpu - before.cpu)
            rates = every / (wall - begin.wall), every / (cpu - begin.cpu)
            yield Stretch(wanted, *rates, moment.rss_mib)
            begin, wanted = Moment(wall, cpu, wanted, moment.rss_mib), wanted + every
        before = moment


def compare(stretches: Sequence[Stretch], clock: str = "wall") -> tuple[float, float]:
    """Return growth of memory and loss of speed from the second stretch to the last, as shares."""
    assert len(stretches) > 2, "wanted three stretches or more"
    second, last = stretches[1], stretches[-1]
    growth = last.rss_mib / second.rss_mib - 1
    if clock == "cpu":
        return growth, 1 - last.per_cpu_second / second.per_cpu_second
    return growth, 1 - last.per_second / second.per_second


def _look(out: Path, pid: int | None = None) -> Moment | None:
    """Return the newest line of the throughput file, with the memory of now."""
    files = list((out / "_throughput").glob("*.jsonl"))
    text = files[0].read_text() if files else ""
    if not text.endswith("\n"):
        return None
    line = json.loads(text.splitlines()[-1])
    rss = 0.0
    if pid is not None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            return None
        sizes = [one for one in status.splitlines() if one.startswith("VmRSS:")]
        if not sizes:
            return None  # it is ending
        rss = int(sizes[0].split()[1]) / 1024
    return Moment(line["seconds"], line["cpu_seconds"], line["images"], rss)


if __name__ == "__main__":
    sys.exit(main())
