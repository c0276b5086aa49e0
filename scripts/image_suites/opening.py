"""Every file of a suite through the opener, one after another, in a process that may die.

As a program it opens the files whose names come on stdin, and writes a JSON line before and
after each; a file over the time limit ends it. `open_all` runs it, and starts it anew behind
whatever file it ended at.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import SampleError
from pipeline.images.opening import ImageSettings, facts_of, open_image

MAX_SECONDS = 30
LENIENT = ImageSettings(allow_truncated=True)


@dataclass(slots=True)
class Opened:
    """What came of a suite's files."""

    codes: Counter[str] = field(default_factory=Counter)  # `ok`, or an error's code
    faults: list[str] = field(default_factory=list)  # files that ended the process
    slowest: float = 0.0
    slowest_file: str = ""
    peak_mb: float = 0.0


def open_all(files: list[Path]) -> Opened:
    """Open all files in processes of their own; what kills one is a fault, and the next goes on."""
    opened = Opened()
    left = list(files)
    while left:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.image_suites.opening"],
            input="\n".join(map(str, left)),
            capture_output=True,
            text=True,
            errors="replace",
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        results = [line for line in lines if "seconds" in line]
        for line in results:
            opened.codes[line["result"]] += 1
            opened.peak_mb = max(opened.peak_mb, line["peak_mb"])
            if line["seconds"] > opened.slowest:
                opened.slowest, opened.slowest_file = line["seconds"], line["file"]
        if done.returncode == 0 and len(results) == len(left):
            break
        struck = left[len(results)]
        opened.faults.append(f"{struck}: exit {done.returncode}: {done.stderr[-1500:]}")
        left = left[len(results) + 1 :]
    return opened


def result_of(data: bytes) -> str:
    """Open bytes strictly and leniently, and ask for their facts; return `ok` or the code."""
    facts_of(data)
    try:
        open_image(data)
    except SampleError as error:
        with contextlib.suppress(SampleError):
            open_image(data, LENIENT)
        return error.code
    return "ok"


def main() -> None:
    """Read names, write results."""
    for name in sys.stdin.read().splitlines():
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        began = time.perf_counter()
        result = result_of(Path(name).read_bytes())
        line = {
            "file": name,
            "result": result,
            "seconds": round(time.perf_counter() - began, 3),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
