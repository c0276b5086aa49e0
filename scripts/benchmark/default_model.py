"""The real command on the example photographs: where the time of a whole run goes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from pipeline.records import Sample

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = str(ROOT / "scripts" / "examples" / "*.tar")
NETWORK = ("vision_seconds", "prefill_seconds", "decode_seconds")


def measure_run(
    num_images: int, options: Sequence[str] = (), shards: str = EXAMPLES
) -> dict[str, float]:
    """Caption the shards' images, repeated under new names, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shard, out = Path(folder) / "bench-000000.tar", Path(folder) / "out"
        write_repeated(shard, shards, num_images)
        command = [sys.executable, "-m", "jobs", "run", "--shards", str(shard), "--out", str(out)]
        seconds, peak = _run([*command, *options])
        (log,) = (out / "_throughput").glob("*.jsonl")
        last = json.loads(log.read_text().splitlines()[-1])
    return _summary(last, seconds, peak)


def write_repeated(path: Path, pattern: str, num_images: int) -> None:
    """Write a shard of `num_images` samples, those of `pattern` over and over."""
    samples = [s for shard in expand_shards([pattern]) for s in read_shard(shard)]
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(islice(cycle(samples), num_images)):
            _add(tar, f"{number:07d}{Path(sample.ref.member).suffix}", sample)


def _add(tar: tarfile.TarFile, name: str, sample: Sample) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(sample.data)
    tar.addfile(info, io.BytesIO(sample.data))


# A new process counts its parent's memory as its own until it runs a program: this parent is small.
_SMALL_PARENT = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def _run(command: Sequence[str]) -> tuple[float, int]:
    """Run a command; return its wall seconds and its peak resident bytes."""
    began = time.perf_counter()
    small = [sys.executable, "-c", _SMALL_PARENT, *command]
    ended = subprocess.run(small, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}")
    return time.perf_counter() - began, int(ended.stdout) * 1024


def _summary(last: dict[str, float], process_seconds: float, peak_bytes: int) -> dict[str, float]:
    network = sum(last[name] for name in NETWORK)
    return {
        "images": last["images"],
        "images_per_second": round(last["images"] / last["seconds"], 2),
        "milliseconds_per_decode_step": per(last["decode_seconds"], last["decode_steps"]),
        "milliseconds_per_prefill": per(last["prefill_seconds"], last["prefills"]),
        "milliseconds_vision_per_image": per(last["vision_seconds"], last["images"]),
        "share_outside_network": round(1 - network / last["seconds"], 4),
        "share_waiting_for_input": round(last["waiting_seconds"] / last["seconds"], 4),
        "share_writing": round(last["writing_seconds"] / last["seconds"], 4),
        "slots_busy": per(last["busy_slot_steps"], last["total_slot_steps"], scale=1),
        "seconds_before_captioning": round(process_seconds - last["seconds"], 2),
        "peak_resident_mib": peak_bytes >> 20,
    }


def per(total: float, count: float, *, scale: float = 1000) -> float:
    """Return the mean of a total, in thousandths unless `scale` says otherwise."""
    return round(scale * total / count, 3) if count else 0.0
