"""In float32 every contender gives the same tokens; where two do not, it must be a tie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pipeline.models.vlm import CaptionModel
from pipeline.records import Request
from scripts.benchmark.contest import Standing, agreement, compete
from scripts.benchmark.ours import uncached_logits
from scripts.benchmark.rivals import CPU, Field, Sizes
from scripts.benchmark.shapes import NetworkShape
from scripts.benchmark.workload import Outcome, Workload, make_workload

TIE = 1e-3  # logits are about 20: rounding in another order moves them by a hundredth of this
SMALL = Sizes(8, 4, 2, 8, (4,), 4, 4, 4)


def check_float32(
    shape: NetworkShape, work: Path, rivals: Sequence[str], device: torch.device = CPU
) -> list[str]:
    """Caption eight pictures briefly in float32; return what is wrong, a line each."""
    field = Field(shape, work, torch.float32, SMALL, device)
    every = make_workload(shape, 64, is_skewed=True, seed=2)
    shortest = sorted(range(len(every)), key=every.lengths.__getitem__)[: SMALL.images]
    workload = every.pick(sorted(shortest)).renumbered()
    entries = [e for e in field.entries(rivals) if e.dtype == "float32"]
    try:
        standings = compete(workload, entries, 1, lambda line: None)
    finally:
        field.close()
    return wrong_tokens(field.ours, workload, standings)


def wrong_tokens(
    model: CaptionModel, workload: Workload, standings: Sequence[Standing]
) -> list[str]:
    """Say whose tokens differ from ours, the first of the standings, in float32."""
    ours = standings[0].outcome
    assert ours is not None, "a contest was not run"
    wrong = []
    for standing in standings[1:]:
        theirs = standing.outcome
        assert theirs is not None, "a contest was not run"
        if standing.entry.dtype == "float32" and _differs(model, workload, ours, theirs):
            same = agreement(ours, theirs)
            rows = f"{same.num_equal_rows} of {same.num_rows} captions equal in float32"
            wrong.append(f"WRONG: {standing.entry.contender.name}: {rows}")
    return wrong


def _differs(model: CaptionModel, workload: Workload, ours: Outcome, theirs: Outcome) -> bool:
    requests = {request.ref.index: request for request in workload.requests}
    return any(
        not _is_tie(model, requests[index], ours.tokens[index], tokens)
        for index, tokens in theirs.tokens.items()
        if tokens != ours.tokens[index]
    )


@torch.inference_mode()
def _is_tie(
    model: CaptionModel, request: Request, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> bool:
    """True if the network likes both tokens alike where two captions part."""
    parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if parted is None or request.images is None:
        return False
    (features,) = model.encode_images([request.images])
    logits = uncached_logits(model, [*request.prompt_ids, *ours[:parted]], features)[0]
    return bool((logits[ours[parted]] - logits[theirs[parted]]).abs() < TIE)
