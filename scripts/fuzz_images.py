"""Open mutated pictures until the time is over; every fault is kept and printed.

    scripts/fuzz-images --seconds 600 [--seeds FOLDER] [--jobs 2]

FOLDER holds pictures to mutate, such as WORKDIR/suites of `scripts/image-suites`; files over
64 kB are left out. Without it, small pictures of each format are made.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.images.formats import sniff
from tests.fuzzing import Fuzzed, fuzz, seed_pictures

MAX_SEED_BYTES = 1 << 16


def write_seeds(folder: Path, source: Path | None) -> int:
    """Fill a folder with pictures to mutate; return how many."""
    for name, data in seed_pictures().items():
        (folder / name.replace(" ", "-").replace(";", "")).write_bytes(data)
    for number, path in enumerate(sorted(source.rglob("*")) if source else ()):
        if path.is_file() and path.stat().st_size <= MAX_SEED_BYTES:
            data = path.read_bytes()
            if sniff(data):
                (folder / f"{number:06d}").write_bytes(data)
    return len(list(folder.iterdir()))


def main() -> None:
    """Run all of it, and exit with 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-images-"))
    seeds = folder / "seeds"
    seeds.mkdir()
    num_seeds = write_seeds(seeds, asked.seeds)
    with ThreadPoolExecutor(asked.jobs) as pool:
        numbers = [asked.seed + 10_000 * job for job in range(asked.jobs)]
        runs = list(pool.map(lambda one: fuzz(seeds, asked.seconds, one, folder), numbers))
    report(runs, num_seeds, asked.seed)
    sys.exit(any(run.faults for run in runs))


def report(runs: list[Fuzzed], num_seeds: int, seed: int) -> None:
    """Print the faults, a table, and last one JSON line."""
    for fault in (fault for run in runs for fault in run.faults):
        print(fault)
    total = sum((run.results for run in runs), type(runs[0].results)())
    for result, count in total.most_common():
        print(f"{result:12} {count:8}")
    found = {
        "seeds": num_seeds,
        "seed": seed,
        "pictures": total.total(),
        "results": dict(total.most_common()),
        "slowest_seconds": round(max(run.slowest for run in runs), 3),
        "grown_mb": round(max(run.grown_mb for run in runs)),
        "stderr_lines": sum(run.stderr_lines for run in runs),
        "faults": sum(len(run.faults) for run in runs),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
