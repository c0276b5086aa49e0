"""The command line of `scripts/bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipeline.backends.placement import choose_dtype
from scripts.benchmark import report
from scripts.benchmark.clock import CLOCKS, choose_clock
from scripts.benchmark.contest import agreement, compete, ratio
from scripts.benchmark.default_model import measure_run
from scripts.benchmark.rivals import RIVALS, Field, Sizes
from scripts.benchmark.shapes import SHAPES
from scripts.benchmark.workload import make_workload

CONTESTS = {
    "nanovlm-skewed": ("nanovlm-222m", True),
    "nanovlm-one-length": ("nanovlm-222m", False),
    "smolvlm-skewed": ("smolvlm-256m", True),
    "smolvlm-one-length": ("smolvlm-256m", False),
    "tiny": ("tiny-smolvlm", True),
}
WORKLOADS = (*CONTESTS, "default")
FULL = Sizes(256, 64, 16, 96, (8, 16, 32), 8, 16, 4)
QUICK = Sizes(96, 32, 16, 32, (16,), 8, 6, 2)
QUICK_WORKLOADS = ("nanovlm-skewed", "smolvlm-skewed", "default")
QUICK_RIVALS = {"smolvlm-skewed": ("transformers", "sorted")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads asked for; print tables and, last, one line of JSON."""
    chosen = _parse(arguments)
    torch.set_num_threads(chosen.threads)
    choose_clock(chosen.clock)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    results: dict[str, object] = {}
    ratios: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for name in chosen.workload:
        print(f"\n== {name} ==", flush=True)
        if name == "default":
            results[name] = _default(chosen)
        else:
            results[name], ratios[name] = _contest(name, chosen, wrong)
    for line in wrong:
        print(line)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {chosen.threads} threads"
    print(json.dumps({"machine": machine, "torch": torch.__version__, **results, "ratios": ratios}))
    return 1 if wrong else 0


def _contest(
    name: str, chosen: argparse.Namespace, wrong: list[str]
) -> tuple[dict[str, object], dict[str, float]]:
    shape_name, is_skewed = CONTESTS[name]
    shape = SHAPES[shape_name]
    dtype = choose_dtype(chosen.dtype, torch.device("cpu"))
    field = Field(shape, chosen.work, dtype, chosen.sizes)
    workload = make_workload(shape, chosen.sizes.images, is_skewed=is_skewed)
    rivals = QUICK_RIVALS.get(name, RIVALS) if chosen.quick else RIVALS
    entries = field.entries(chosen.rivals or rivals)
    try:
        standings = compete(workload, entries, chosen.rounds, _tell)
    finally:
        field.close()
    ours = standings[0]
    assert ours.outcome is not None
    lengths = sorted(workload.lengths)
    print(
        f"{shape.name}, {field.dtype_name}, {len(workload)} images, captions of "
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{chosen.sizes.slots} slots, medians of {chosen.rounds}"
    )
    lines = [*report.contest_table(standings), report.shares_line(ours), *field.skipped]
    print("\n".join(lines))
    for standing in standings:
        assert standing.outcome is not None
        same = agreement(ours.outcome, standing.outcome)
        is_exact = same.num_equal_rows == same.num_rows
        if standing.entry.dtype == field.dtype_name == "float32" and not is_exact:
            wrong.append(f"WRONG: {name}: {standing.entry.contender.name}: tokens differ")
        if standing.entry.dtype != "int8" and same.num_equal_lengths != same.num_rows:
            wrong.append(f"WRONG: {name}: {standing.entry.contender.name}: lengths differ")
    ratios = {s.entry.rival: round(ratio(ours, s), 2) for s in standings[1:]}
    rates = {s.entry.contender.name: round(s.rate, 3) for s in standings}
    return {"images_per_second": rates, "dtype": field.dtype_name, **ours.outcome.counts}, ratios


def _default(chosen: argparse.Namespace) -> dict[str, float]:
    result = measure_run(600 if chosen.quick else 2000, ["--model", "default"])
    print("\n".join(report.facts(result.items())))
    return result


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under five minutes on two cores")
    parser.add_argument("--workload", type=_names(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--rivals", type=_names(RIVALS), help=", ".join(RIVALS))
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--images", type=int, help="images that our engine gets")
    parser.add_argument("--slots", type=int, help="slots of our engine")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS), help="cpu: see clock.py")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "captionjob-bench",
        help="where random weights and a rival's environment are kept between runs",
    )
    chosen = parser.parse_args(arguments)
    sizes = QUICK if chosen.quick else FULL
    images, slots = chosen.images or sizes.images, chosen.slots or sizes.slots
    chosen.sizes = Sizes(
        images,
        slots,
        min(sizes.prefill, slots),
        min(images, sizes.static_images),
        sizes.static_batches,
        min(images, sizes.plain_images),
        min(images, sizes.one_images),
        min(images, sizes.uncached_images),
    )
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    chosen.workload = chosen.workload or (QUICK_WORKLOADS if chosen.quick else WORKLOADS)
    return chosen


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; wanted {', '.join(known)}")
        return names

    return parse
