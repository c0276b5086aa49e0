"""The command line of `scripts/bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipeline.backends.placement import choose_device, choose_dtype
from pipeline.errors import RequestError
from scripts.benchmark import report
from scripts.benchmark.clock import CLOCKS, choose_clock, measure_on
from scripts.benchmark.default_model import measure_run
from scripts.benchmark.exactness import check_float32
from scripts.benchmark.match import Plan, play
from scripts.benchmark.rivals import RIVALS, Sizes
from scripts.benchmark.shapes import SHAPES
from scripts.benchmark.stages import overhead

CONTESTS = {
    "nanovlm-skewed": ("nanovlm-222m", True),
    "nanovlm-one-length": ("nanovlm-222m", False),
    "smolvlm-skewed": ("smolvlm-256m", True),
    "smolvlm-one-length": ("smolvlm-256m", False),
    "tiny": ("tiny-smolvlm", True),
}
WORKLOADS = ("overhead", "exact", *CONTESTS, "default")
# A tower of 512 pixels costs six times as much as one of 224: fewer pictures do.
FULL = {
    "nanovlm": Sizes(512, 64, 16, 96, (8, 16, 32), 8, 16, 4),
    "smolvlm": Sizes(160, 32, 8, 64, (8, 16, 32), 8, 8, 4),
}
QUICK = {
    "nanovlm": Sizes(160, 32, 8, 32, (16,), 8, 6, 2),
    "smolvlm": Sizes(48, 16, 8, 32, (16,), 8, 4, 2),
}
# A GPU ends the sizes above before it is warm. The loops that waste it most still get few.
ON_GPU = {
    "nanovlm": Sizes(4096, 256, 32, 768, (32, 64, 128), 64, 32, 8),
    "smolvlm": Sizes(2048, 256, 32, 384, (32, 64, 128), 64, 32, 8),
}
QUICK_WORKLOADS = ("overhead", "exact", "nanovlm-skewed", "smolvlm-skewed", "default")
QUICK_RIVALS = {
    "nanovlm-skewed": ("transformers", "sorted", "plain", "plain-float32", "one", "uncached"),
    "smolvlm-skewed": ("transformers", "openvino"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads asked for; print tables and, last, one line of JSON."""
    chosen = _parse(arguments)
    torch.set_num_threads(chosen.threads)
    choose_clock(chosen.clock)
    measure_on(chosen.device)
    if chosen.device.type == "cuda":
        torch.cuda.set_device(chosen.device)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    values: dict[str, object] = {}
    ratios: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for name in chosen.workload:
        print(f"\n== {name} ==", flush=True)
        if name in CONTESTS:
            shape_name, is_skewed = CONTESTS[name]
            plan = _plan(name, chosen)
            result = play(SHAPES[shape_name], plan, is_skewed=is_skewed, tell=_tell)
            values[name], ratios[name] = result.values, result.ratios
            wrong += result.wrong
        elif name == "exact":
            values[name] = _exact(chosen, wrong)
        elif name == "default":
            values[name], ratios[name] = _default(chosen)
        else:
            values[name] = _overhead()
    print("\n".join(["", *wrong]))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {chosen.threads} threads"
    if chosen.device.type == "cuda":
        machine += f", {torch.cuda.get_device_name(chosen.device)}"
    print(json.dumps({"machine": machine, "torch": torch.__version__, **values, "ratios": ratios}))
    return 1 if wrong else 0


def _sizes(name: str, chosen: argparse.Namespace) -> Sizes:
    """Return the sizes of a workload, with what the command line says otherwise."""
    sizes = QUICK if chosen.quick else FULL if chosen.device.type == "cpu" else ON_GPU
    known = sizes[SHAPES[CONTESTS[name][0]].family]
    images, slots = chosen.images or known.images, chosen.slots or known.slots
    return Sizes(
        images,
        slots,
        min(known.prefill, slots),
        min(images, known.static_images),
        known.static_batches,
        min(images, known.plain_images),
        min(images, known.one_images),
        min(images, known.uncached_images),
    )


def _plan(name: str, chosen: argparse.Namespace) -> Plan:
    rivals = QUICK_RIVALS.get(name, RIVALS) if chosen.quick else RIVALS
    is_large = SHAPES[CONTESTS[name][0]].vision.image_size > 256
    return Plan(
        work=chosen.work,
        dtype=choose_dtype(chosen.dtype, chosen.device),
        sizes=_sizes(name, chosen),
        rivals=chosen.rivals or rivals,
        num_rounds=chosen.rounds,
        step_rows=(1, 8, 32, 64) if chosen.device.type == "cpu" else (1, 8, 32, 64, 256),
        vision_images=((1, 4) if is_large else (1, 8)) if chosen.quick else (1, 8, 32),
        device=chosen.device,
    )


def _exact(chosen: argparse.Namespace, wrong: list[str]) -> dict[str, object]:
    """Compare tokens in float32: of all networks, or quickly of the tiny ones."""
    names = [name for name in SHAPES if name.startswith("tiny") or not chosen.quick]
    for name in names:
        found = check_float32(SHAPES[name], chosen.work, chosen.rivals or RIVALS, chosen.device)
        print(f"{name}, float32: {'as follows' if found else 'every contender has our tokens'}")
        print("\n".join(found), end="\n" if found else "")
        wrong += found
    return {"shapes": names}


def _overhead() -> dict[str, object]:
    """Measure what a step of 64 slots costs outside the network."""
    result = {f"vocabulary of {size}": round(1000 * overhead(size), 3) for size in (256, 49_152)}
    print("milliseconds of a step of 64 slots that are not the network's:")
    print("\n".join(report.facts(result.items())))
    return dict(result)


def _default(chosen: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Run the real command on the example photographs, in slots and one image at a time."""
    num_images = 600 if chosen.quick else 2000
    threads = ["--model", "default", "--threads", str(chosen.threads)]
    threads += ["--device", str(chosen.device)]
    one = [*threads, "--slots", "1", "--prefill-batch", "1"]
    runs = [(measure_run(num_images, threads), measure_run(num_images // 4, one))]
    for _ in range(1, chosen.rounds):
        runs.append((measure_run(num_images, threads), measure_run(num_images // 4, one)))
    result = runs[0][0]
    print("\n".join(report.facts(result.items())))
    rate = "images_per_second"
    times = round(statistics.median(ours[rate] / theirs[rate] for ours, theirs in runs), 2)
    print(f"{times:.2f}x one image at a time (network and loading, without the start)")
    return result, {"one": times}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under five minutes on two cores")
    parser.add_argument("--workload", type=_names(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--rivals", type=_names(RIVALS), help=", ".join(RIVALS))
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--device", default="cpu", type=_device, help="cpu, cuda or cuda:N")
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
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    everything = tuple(name for name in WORKLOADS if name != "tiny")
    if chosen.device.type != "cpu":
        everything = tuple(name for name in CONTESTS if name != "tiny")
    chosen.workload = chosen.workload or (QUICK_WORKLOADS if chosen.quick else everything)
    return chosen


def _device(name: str) -> torch.device:
    try:
        return choose_device(name)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; wanted {', '.join(known)}")
        return names

    return parse
