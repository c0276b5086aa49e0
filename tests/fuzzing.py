"""Mutated pictures through the opener, in processes that may die, hang or grow.

    fuzz() ──► child: mutate, note the bytes in a file, open, check; again until the time is over
           └── a child that died, or was over the time limit: its last bytes are the find

Each picture must give an image or a SampleError, within MAX_SECONDS, in MAX_BYTES of memory.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from pipeline.errors import SampleError
from pipeline.fixtures import make_image_bytes
from pipeline.images.opening import ImageSettings, facts_of, open_image
from tests.commands import REPOSITORY, environment
from tests.mutations import mutate

MAX_SECONDS = 10
MAX_BYTES = 1 << 30  # of address space beyond what the imports take
MAX_PIXELS = 2_000_000
CODES = ("empty", "unreadable", "truncated", "too_large", "unsupported")
STRICT = ImageSettings(max_pixels=MAX_PIXELS)
LENIENT = ImageSettings(max_pixels=MAX_PIXELS, allow_truncated=True)


@dataclass(slots=True)
class Fuzzed:
    """What a fuzz run found."""

    results: Counter[str] = field(default_factory=Counter)  # `ok` or a code -> pictures
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    grown_mb: float = 0.0
    stderr_lines: int = 0

    @property
    def num_pictures(self) -> int:
        """How many were opened."""
        return self.results.total()


def seed_pictures() -> dict[str, bytes]:
    """Return small pictures of every format that is opened, in their usual kinds."""
    Image.init()
    found = {}
    for format in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000"):
        found[format] = make_image_bytes(format)
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        found[f"PNG {mode}"] = make_image_bytes("PNG", mode=mode)
    for packing in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        found[f"TIFF {packing}"] = make_image_bytes("TIFF", compression=packing)
    found["TIFF group4"] = make_image_bytes("TIFF", mode="1", compression="group4")
    found["JPEG progressive"] = make_image_bytes("JPEG", progressive=True)
    found["JPEG CMYK"] = make_image_bytes("JPEG", mode="CMYK")
    found["WEBP lossless"] = make_image_bytes("WEBP", mode="RGBA", lossless=True)
    found["ICO BMP"] = make_image_bytes("ICO", bitmap_format="bmp")
    for format in ("AVIF", "HEIF"):
        if format in Image.SAVE:
            found[format] = make_image_bytes(format)
    return found


def check(data: bytes) -> str:
    """Open bytes as strictly and as leniently as can be; return `ok` or the code."""
    facts_of(data)
    results = []
    for settings in (STRICT, LENIENT):
        try:
            picture, facts = open_image(data, settings)
        except SampleError as caught:
            error = caught
        else:
            assert picture.mode == "RGB"
            assert picture.size == (facts.width, facts.height)
            results.append("ok")
            continue
        assert error.code in CODES, error
        assert "\n" not in error.detail, error
        results.append(error.code)
    return results[0]


def fuzz(seeds: Path, seconds: float, seed: int, folder: Path) -> Fuzzed:
    """Fuzz for a time with the files in `seeds`; what kills a child is kept in `folder`."""
    fuzzed = Fuzzed()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0.5:
        note = folder / f"input-{seed}"
        command = [sys.executable, "-m", "tests.fuzzing", str(seeds), str(left), str(seed)]
        log = folder / f"stderr-{seed}"
        with log.open("wb") as file:
            done = subprocess.run(
                [*command, str(note)],
                cwd=REPOSITORY,
                env=environment({"OPENBLAS_NUM_THREADS": "1"}),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        said = log.read_text(errors="replace")
        if done.returncode:
            fuzzed.faults.append(f"{note}: exit {done.returncode}: {said[-1500:]}")
            fuzzed.results["fault"] += 1
        else:
            _add(fuzzed, json.loads(done.stdout))
            fuzzed.stderr_lines += said.count("\n")
        seed += 1
    return fuzzed


def _add(fuzzed: Fuzzed, found: dict[str, object]) -> None:
    results, slowest, grown = found["results"], found["slowest"], found["grown_mb"]
    assert isinstance(results, dict)
    assert isinstance(slowest, float)
    assert isinstance(grown, float)
    fuzzed.results.update(results)
    fuzzed.slowest = max(fuzzed.slowest, slowest)
    fuzzed.grown_mb = max(fuzzed.grown_mb, grown)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _work(seeds: Path, seconds: float, seed: int, note: Path) -> dict[str, object]:
    """What a child does; its last input is always in `note`."""
    rng = random.Random(seed)
    pictures = [path.read_bytes() for path in sorted(seeds.iterdir())]
    for data in pictures:
        check(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    before = _peak_mb()
    results: Counter[str] = Counter()
    slowest = 0.0
    until = time.monotonic() + seconds
    descriptor = os.open(note, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    while time.monotonic() < until:
        data = mutate(rng, rng.choice(pictures), rng.choice(pictures))
        os.ftruncate(descriptor, os.pwrite(descriptor, data, 0))
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        began = time.perf_counter()
        results[check(data)] += 1
        slowest = max(slowest, time.perf_counter() - began)
    faulthandler.cancel_dump_traceback_later()
    note.unlink()
    return {"results": results, "slowest": slowest, "grown_mb": _peak_mb() - before}


if __name__ == "__main__":
    print(
        json.dumps(
            _work(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        )
    )
