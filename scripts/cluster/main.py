"""Starts engines and servers, breaks them while the job runs, and compares every row.

The last line is one JSON object. Exit codes: 0 all held, 1 something did not, 3 all that could
be started held, and something could not be installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from scripts.cluster.install import MissingError
from scripts.cluster.result import Result
from scripts.cluster.scenarios import SCENARIOS, Scenario

EXIT_HELD, EXIT_BROKEN, EXIT_MISSING = 0, 1, 3


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line, run the scenarios, print what was found."""
    asked = _parser().parse_args(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    names = asked.only or list(SCENARIOS)
    folder = nullcontext(asked.work) if asked.work else tempfile.TemporaryDirectory(prefix="cj-")
    results: list[Result] = []
    missing: dict[str, str] = {}
    began = time.monotonic()
    try:
        with folder as work:
            if not asked.work:
                # munged wants a way to its socket that is open to all; this folder is not.
                Path(work).chmod(0o755)
            for name in names:
                for result in _run(name, Path(work).resolve(), asked.quick, missing):
                    results.append(result)
                    _say(f"{'ok' if result.is_ok else 'NOT OK'}: {result.name}: {result.detail}")
    except KeyboardInterrupt:
        _say("interrupted; all that was started is stopped")
        return 130
    for line in table(results):
        print(line)
    for name, reason in missing.items():
        print(f"not run: {name}: {reason}")
    is_ok = all(result.is_ok for result in results)
    found = {"ok": is_ok, "seconds": round(time.monotonic() - began, 1), "missing": missing}
    print(json.dumps({**found, "results": [asdict(result) for result in results]}))
    return EXIT_BROKEN if not is_ok else EXIT_MISSING if missing else EXIT_HELD


def table(results: Sequence[Result]) -> list[str]:
    """Return the results as lines for people."""
    rows = [("scenario", "rows", "retries", "seconds", "lost", "ok")]
    rows += [
        (
            result.name,
            f"{result.rows:,}",
            f"{result.retries:,}",
            f"{result.seconds:.0f}",
            f"{result.seconds_lost:.0f}",
            "yes" if result.is_ok else "NO",
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _run(name: str, work: Path, is_quick: bool, missing: dict[str, str]) -> Iterator[Result]:
    """Run one scenario in a folder of its own; what cannot be installed goes into `missing`."""
    scenario = SCENARIOS[name]
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run in the same --work
    folder.mkdir(parents=True)
    began = time.monotonic()
    _say(f"{name}: {scenario.summary}")
    try:
        yield from _results(scenario, work, folder, is_quick)
    except MissingError as error:
        missing[name] = str(error)
        _say(f"not run: {name}: {error}")
    except Exception as error:  # of a foreign server or engine: anything; it is shown
        traceback.print_exc()
        seconds = time.monotonic() - began
        yield Result(name, False, 0, 0, seconds, 0.0, f"{type(error).__name__}: {error}")


def _results(scenario: Scenario, work: Path, folder: Path, is_quick: bool) -> Iterator[Result]:
    tools = work / "tools"
    tools.mkdir(exist_ok=True)
    scenario.install(tools)
    yield from scenario.run(folder, tools, is_quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/cluster-test", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, metavar="NAME", help=f"Of: {', '.join(SCENARIOS)}."
    )
    parser.add_argument("--work", type=Path, help="A folder for everything, which is then kept.")
    parser.add_argument("--quick", action="store_true", help="The short part that CI runs.")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)  # a second one would end the stopping half-way
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
