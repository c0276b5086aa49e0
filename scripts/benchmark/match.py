"""One workload of random weights: the contest, its roofline, and stages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pipeline.models.vlm import VisionLanguageModel
from scripts.benchmark import report, stages
from scripts.benchmark.contest import Standing, agreement, compete, ratio
from scripts.benchmark.exactness import wrong_tokens
from scripts.benchmark.rivals import CPU, OURS, OURS_INT8, Field, Sizes
from scripts.benchmark.roofline import Peaks, decode_work, least_seconds, vision_work
from scripts.benchmark.shapes import NetworkShape
from scripts.benchmark.workload import Workload, make_workload

# Contenders that are compared with each other and not with our network as it is.
PAIRS = (
    ("one", "uncached", "cache alone, one against uncached"),
    (OURS_INT8, "openvino-int8", "8 bit, captionjob-int8 against openvino-int8"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: sizes, rivals, and at which numbers of rows and pictures stages are timed."""

    work: Path
    dtype: torch.dtype
    sizes: Sizes
    rivals: Sequence[str]
    num_rounds: int
    step_rows: Sequence[int]
    vision_images: Sequence[int]
    device: torch.device = CPU


@dataclass(frozen=True, slots=True)
class Result:
    """What a workload gave: values for JSON, ratios by rival, and what was wrong."""

    values: dict[str, object]
    ratios: dict[str, float]
    wrong: list[str]


def play(
    shape: NetworkShape, plan: Plan, *, is_skewed: bool, tell: Callable[[str], None]
) -> Result:
    """Run a workload and print its tables."""
    peaks = Peaks.measure(plan.dtype, plan.device)
    field = Field(shape, plan.work, plan.dtype, plan.sizes, plan.device)
    try:
        workload = make_workload(shape, plan.sizes.images, is_skewed=is_skewed)
        standings = compete(workload, field.entries(plan.rivals), plan.num_rounds, tell)
        share = _roofline_share(workload, plan, peaks, standings[0])
        print(_heading(workload, plan, peaks))
        print("\n".join([*report.contest_table(standings), report.shares_line(standings[0])]))
        print(f"share of the roofline, end to end: {share:.1%}")
        alone, reading = _stages(field, workload, plan, peaks)
        lines = [*report.stage_table(alone), report.reading_line(reading), *field.skipped]
        print("\n".join(lines))
    finally:
        field.close()
    result = _result(standings, field, workload, share, alone)
    return replace(result, values={**result.values, "memory_speed_share": reading})


def _heading(workload: Workload, plan: Plan, peaks: Peaks) -> str:
    lengths = sorted(workload.lengths)
    return (
        f"{workload.shape.name}, {str(plan.dtype).removeprefix('torch.')}, {len(workload)} images, "
        f"captions of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{plan.sizes.slots} slots, medians of {plan.num_rounds}; "
        f"peaks {peaks.flops / 1e9:.0f} GFLOP/s, {peaks.bytes_read / 1e9:.1f} GB/s"
    )


def _roofline_share(workload: Workload, plan: Plan, peaks: Peaks, ours: Standing) -> float:
    least = least_seconds(workload, plan.sizes.slots, plan.dtype, peaks)
    return least * ours.rate / len(workload)


def _stages(
    field: Field, workload: Workload, plan: Plan, peaks: Peaks
) -> tuple[dict[str, dict[str, float]], dict[int, float]]:
    """Time stages alone: milliseconds by stage and contender, and the roofline's.

    Returns besides, by rows, at what share of the memory's speed our decode step reads.
    """
    shape, alone = workload.shape, {}
    reading: dict[int, float] = {}
    most = max(*plan.step_rows, *plan.vision_images)
    steady = make_workload(shape, most, is_skewed=False, seed=3)
    for rows in plan.step_rows:
        batch = steady.pick(range(rows)).without_pictures()
        columns = sum(len(r.prompt_ids) for r in batch.requests) / rows + stages.NUM_STEPS / 2
        work = decode_work(shape, rows, columns, plan.dtype)
        least = work.least_seconds(peaks)
        step = {
            name: stages.engine_step(model, batch.requests, plan.dtype, plan.device)
            for name, model in _ours(field).items()
        }
        reading[rows] = round(work.bytes_read / step[OURS] / peaks.bytes_read, 3)
        if field.has_transformers(plan.rivals):
            step["transformers"] = stages.transformers_step(field.transformers, batch)
        for rival, worker in field.workers.items():
            step[rival] = stages.openvino_step(worker, batch)
        alone[f"decode step, {rows} rows"] = {**step, "roofline": least}
    for images in plan.vision_images:
        batch = steady.pick(range(images))
        least = vision_work(shape, images, plan.dtype).least_seconds(peaks)
        seen = {
            name: stages.vision(partial(stages.encode_ours, model, batch))
            for name, model in _ours(field).items()
        }
        if field.has_transformers(plan.rivals):
            seen["transformers"] = stages.vision(partial(field.transformers.encode, batch))
        for rival, worker in field.workers.items():
            seen[rival] = min(worker.ask("vision", batch)["seconds"] for _ in range(3))
        alone[f"vision, {images} images"] = {**seen, "roofline": least}
    milliseconds = {
        stage: {who: round(1000 * seconds, 3) for who, seconds in times.items()}
        for stage, times in alone.items()
    }
    return milliseconds, reading


def _ours(field: Field) -> dict[str, VisionLanguageModel]:
    """Return our networks by the names of their columns."""
    eight = {} if field.ours_int8 is None else {OURS_INT8: field.ours_int8}
    return {OURS: field.ours, **eight}


def _result(
    standings: Sequence[Standing],
    field: Field,
    workload: Workload,
    share: float,
    alone: dict[str, dict[str, float]],
) -> Result:
    ours = standings[0]
    assert ours.outcome is not None, "a contest was not run"
    wrong = wrong_tokens(field.ours, workload, standings)
    for standing in standings[1:]:
        assert standing.outcome is not None, "a contest was not run"
        same = agreement(ours.outcome, standing.outcome)
        if standing.entry.dtype != "int8" and same.num_equal_lengths != same.num_rows:
            wrong.append(f"WRONG: {standing.entry.contender.name}: captions of other lengths")
    values: dict[str, object] = {
        "dtype": field.dtype_name,
        "images_per_second": {s.entry.contender.name: round(s.rate, 3) for s in standings},
        "tokens_per_second": round(ours.rate * workload.num_tokens / len(workload)),
        "roofline_share": round(share, 4),
        **{name: round(value, 4) for name, value in ours.outcome.counts.items()},
        "milliseconds": alone,
    }
    ratios = {s.entry.rival: round(ratio(ours, s), 2) for s in standings[1:]}
    rates = {s.entry.rival: s for s in standings}
    for faster, slower, name in PAIRS:
        if {faster, slower} <= rates.keys():
            ratios[name] = round(ratio(rates[faster], rates[slower]), 2)
    return Result(values, ratios, wrong)
