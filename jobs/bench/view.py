"""What `bench` found, as a table for people, a command to copy, and one line of JSON."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from jobs.bench.run import Bench, bench
from jobs.config import RunConfig
from jobs.result import EXIT_DONE
from jobs.stopping import EXIT_AGAIN, Stop
from jobs.terminal import printable
from pipeline.throughput import Snapshot
from pipeline.verdict import cells_of

STOP_SECONDS = 2.0  # after a signal


def print_bench(config: RunConfig, seconds: float, words: Sequence[str]) -> int:
    """Measure, print, return the exit code; `words` are the options that were given."""
    stop = Stop(STOP_SECONDS)
    with stop.listening():
        found = bench(config, seconds, stop, _say)
    for line in lines(found, words):
        print(printable(line))
    print(json.dumps(as_json(found, words)), flush=True)
    return EXIT_AGAIN if found.is_stopped else EXIT_DONE


def lines(found: Bench, words: Sequence[str]) -> list[str]:
    """Return the findings, line by line."""
    shown = []
    if found.whole is not None:
        shown += [*_stages(found.whole), ""]
    rates = (
        ("the loader alone", found.loader_alone),
        ("the network alone, fed from memory", found.network_alone),
        ("together", 0.0 if found.whole is None else found.whole.images_per_second),
    )
    width = max(len(name) for name, _ in rates)
    shown += [f"{name.ljust(width)}  {rate:8.1f} images/s" for name, rate in rates if rate]
    if found.whole is not None:
        shown += ["", found.verdict]
    shown += _trials(found)
    if found.is_stopped:
        return [*shown, "", "stopped: this is what was measured until then"]
    return [*shown, "", *_choice(found, words)]


def as_json(found: Bench, words: Sequence[str]) -> dict[str, object]:
    """Return the findings for programs."""
    whole = found.whole or Snapshot()
    return {
        "images_per_second": {
            "loader_alone": round(found.loader_alone, 3),
            "network_alone": round(found.network_alone, 3),
            "together": round(whole.images_per_second, 3),
        },
        "shares": {name: round(share, 4) for name, share in _shares(whole).items()},
        "tokens_per_second": round(whole.tokens_per_second, 3),
        "padding": round(whole.padding_share, 4),
        "slots_busy": round(whole.slots_busy, 4),
        "verdict": found.verdict,
        "asked": asdict(found.asked),
        "chosen": asdict(found.chosen),
        "tried": [
            {**asdict(one.knobs), "images_per_second": round(one.images_per_second, 3)}
            for one in found.tried
        ],
        "untried": [asdict(knobs) for knobs in found.untried],
        "command": command(found, words),
        "is_stopped": found.is_stopped,
    }


def command(found: Bench, words: Sequence[str]) -> str:
    """Return the line that runs the job with the settings chosen."""
    return shlex.join(["captionjob", "run", *words, "--out", "captions", *found.chosen.words()])


def _stages(whole: Snapshot) -> list[str]:
    names = {"waiting": "waiting for input"}
    lines = [f"{names.get(name, name):18} {share:5.0%}" for name, share in _shares(whole).items()]
    others = [f"{name} {value}" for name, value in cells_of(whole) if name not in _shares(whole)]
    return [*lines, "", ", ".join(others)]


def _shares(whole: Snapshot) -> dict[str, float]:
    seconds = {
        "waiting": whole.waiting_seconds,
        "vision": whole.vision_seconds,
        "prefill": whole.prefill_seconds,
        "decode": whole.decode_seconds,
        "writing": whole.writing_seconds,
    }
    return {
        **{name: whole.share(spent) for name, spent in seconds.items()},
        "other": whole.other_share,
    }


def _trials(found: Bench) -> list[str]:
    if not found.tried and not found.untried:
        return []
    shown = ["", "tried"]
    for one in found.tried:
        changes = found.asked.changes(one.knobs) or "as asked, again"
        shown.append(f"  {changes:50} {one.images_per_second:8.1f} images/s")
    if found.untried:
        names = "; ".join(found.asked.changes(knobs) for knobs in found.untried)
        shown.append(f"  not tried, for want of time (more --seconds): {names}")
    return shown


def _choice(found: Bench, words: Sequence[str]) -> list[str]:
    is_same = found.chosen == found.asked
    head = "nothing that was tried is surely faster:" if is_same else "faster here:"
    return [head, f"  {command(found, words)}", ""]


def _say(text: str) -> None:
    print(f"captionjob: {printable(text)}", file=sys.stderr, flush=True)
