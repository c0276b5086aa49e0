"""Fetch, pack, open, run; a table, and last one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from scripts.image_suites.fetch import SUITES, fetch
from scripts.image_suites.opening import MAX_SECONDS, Opened, open_all
from scripts.image_suites.packing import Packed, pack_suite

MAX_MB = 2048


@dataclass(slots=True)
class CommandRun:
    """What the real command made of all shards."""

    exit_code: int
    seconds: float
    peak_mb: float
    stderr_lines: int
    rows: dict[str, Counter[str]] = field(default_factory=dict)  # suite -> `ok` or code -> rows


def main() -> None:
    """Run all of it, and exit with 1 if any file was a fault."""
    parser = argparse.ArgumentParser(prog="scripts/image-suites", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--only", choices=SUITES, nargs="+", default=list(SUITES))
    asked = parser.parse_args()
    shards = asked.workdir / "shards"
    out = asked.workdir / "captions"
    for folder in (shards, out):
        shutil.rmtree(folder, ignore_errors=True)
    shards.mkdir(parents=True)
    packed: dict[str, Packed] = {}
    opened: dict[str, Opened] = {}
    for name, folder in fetch(asked.workdir, asked.only).items():
        packed[name] = pack_suite(name, folder, shards)
        print(f"opening {len(packed[name].files)} files of {name}", file=sys.stderr)
        opened[name] = open_all(packed[name].files)
    done = run_command(shards, out)
    faults = faults_of(packed, opened, done)
    print_table(packed, opened, done)
    print("\n".join(faults))
    print(json.dumps(summary(packed, opened, done, faults)))
    sys.exit(bool(faults))


def run_command(shards: Path, out: Path) -> CommandRun:
    """Caption all shards with the scripted backend, and read the rows back."""
    log = out.with_suffix(".log")
    command = [sys.executable, "-m", "jobs", "run", "--model", "scripted"]
    command += ["--shards", str(shards), "--out", str(out)]
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    done = CommandRun(
        os.waitstatus_to_exitcode(status),
        time.perf_counter() - began,
        usage.ru_maxrss / 1024,
        log.read_bytes().count(b"\n"),
    )
    for path in sorted(out.glob("*.parquet")):
        suite = path.name.rpartition("-")[0].rpartition("-")[0]
        table = pq.read_table(path, columns=["status", "error"], partitioning=None)
        codes = (error or "ok" for error in table["error"].to_pylist())
        done.rows.setdefault(suite, Counter()).update(codes)
    return done


def faults_of(packed: dict[str, Packed], opened: dict[str, Opened], done: CommandRun) -> list[str]:
    """Return all that is not as it must be."""
    faults = [fault for one in opened.values() for fault in one.faults]
    if done.exit_code:
        faults.append(f"captionjob run: exit {done.exit_code}")
    peaks = {name: one.peak_mb for name, one in opened.items()} | {"run": done.peak_mb}
    faults += [f"{name}: {peak:.0f} MB" for name, peak in peaks.items() if peak > MAX_MB]
    for name, one in packed.items():
        found = sum(done.rows.get(name, Counter()).values())
        if found != one.num_rows:
            faults.append(f"{name}: {found} rows, wanted {one.num_rows}")
        internal = done.rows.get(name, Counter())["internal"]
        if internal:
            faults.append(f"{name}: {internal} rows with the code `internal`")
    return faults


def print_table(packed: dict[str, Packed], opened: dict[str, Opened], done: CommandRun) -> None:
    """Print a line for each suite."""
    print(f"{'suite':12} {'files':>6} {'rows':>5} {'slowest':>8} {'peak':>8}  rows by code")
    for name, one in packed.items():
        rows = done.rows.get(name, Counter())
        codes = ", ".join(f"{count} {code}" for code, count in rows.most_common())
        found = opened[name]
        print(
            f"{name:12} {len(one.files):6} {sum(rows.values()):5} {found.slowest:6.2f} s "
            f"{found.peak_mb:5.0f} MB  {codes}"
        )
    print(
        f"captionjob run: exit {done.exit_code}, {done.seconds:.1f} s, peak {done.peak_mb:.0f} MB, "
        f"{done.stderr_lines} lines on stderr; limits {MAX_SECONDS} s a file, {MAX_MB} MB"
    )


def summary(
    packed: dict[str, Packed], opened: dict[str, Opened], done: CommandRun, faults: list[str]
) -> dict[str, object]:
    """Return the one JSON line."""
    codes: Counter[str] = sum(done.rows.values(), Counter())
    return {
        "files": sum(len(one.files) for one in packed.values()),
        "rows": sum(codes.values()),
        "codes": dict(codes.most_common()),
        "slowest_seconds": max(one.slowest for one in opened.values()),
        "peak_mb": round(max([done.peak_mb, *(one.peak_mb for one in opened.values())])),
        "run_seconds": round(done.seconds, 1),
        "faults": len(faults),
    }


if __name__ == "__main__":
    main()
