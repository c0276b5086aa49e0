"""What `verify` found, as lines for people or as JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TextIO

from jobs.joining import join_shards, need_shards
from jobs.results import read_output
from jobs.terminal import bytes_text, plural, printable, time_text
from jobs.verify import Verification, verify_output
from pipeline.errors import ShardError
from pipeline.output.folder import Where

if TYPE_CHECKING:
    from jobs.recaption import Recaptioned

EXIT_HOLDS, EXIT_BROKEN = 0, 1
MAX_SHOWN = 50


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How many images to caption again, and with what."""

    count: int
    seed: int = 0
    model: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(slots=True)
class Agreement:
    """Rows that were captioned again."""

    num_rows: int = 0
    num_same: int = 0
    logprob_gap: float = 0.0
    different: list[Recaptioned] = field(default_factory=list)
    damage: str = ""

    @property
    def holds(self) -> bool:
        """True if every row came out as it is stored."""
        return self.num_same == self.num_rows and not self.damage

    def add(self, one: Recaptioned) -> None:
        """Count one row."""
        self.num_rows += 1
        self.num_same += one.is_same
        self.logprob_gap = max(self.logprob_gap, one.logprob_gap)
        if not one.is_same:
            self.different.append(one)


def print_verification(
    folder: Where,
    patterns: Sequence[str],
    sample: SampleRequest | None,
    stream: TextIO,
    *,
    as_json: bool,
    has_lenient_end: bool = False,
) -> int:
    """Verify, print what was found, return the exit code."""
    verification = verify_output(folder, patterns, has_lenient_end=has_lenient_end)
    agreement = None if sample is None else _agreement(folder, patterns, sample)
    holds = not verification.problems and (agreement is None or agreement.holds)
    if as_json:
        print(_json(verification, agreement, holds), file=stream)
    else:
        for line in [*_lines(verification), *([] if agreement is None else _sampled(agreement))]:
            print(printable(line), file=stream)
        print("all holds" if holds else "NOT all holds", file=stream)
    return EXIT_HOLDS if holds else EXIT_BROKEN


def _agreement(folder: Where, patterns: Sequence[str], sample: SampleRequest) -> Agreement:
    from jobs.recaption import (
        Recaptioner,
        recaption,
    )  # torch, which takes seconds, is for --sample alone

    output = read_output(folder)
    join = need_shards(join_shards(output, patterns))
    agreement = Agreement()
    recaptioner = Recaptioner.of(output, sample.model, sample.device, sample.trust_remote_code)
    rows = recaption(recaptioner, join, sample.count, sample.seed)
    try:
        for one in rows:
            agreement.add(one)
    except ShardError as error:
        agreement.damage = str(error)
    return agreement


def _lines(found: Verification) -> list[str]:
    lines = [
        f"{plural(found.num_shards, 'shard')}, {plural(found.num_images, 'image')}, "
        f"{plural(found.num_rows, 'row')}; {bytes_text(found.num_bytes)} read in "
        f"{time_text(found.seconds)} ({bytes_text(found.bytes_per_second)}/s)"
    ]
    lines += [f"PROBLEM  {problem}" for problem in found.problems[:MAX_SHOWN]]
    if len(found.problems) > MAX_SHOWN:
        lines.append(f"         and {len(found.problems) - MAX_SHOWN} more problems")
    return lines


def _sampled(agreement: Agreement) -> list[str]:
    share = agreement.num_same / agreement.num_rows if agreement.num_rows else 0.0
    lines = [
        f"{plural(agreement.num_rows, 'row')} captioned again alone: {agreement.num_same:,} "
        f"exactly the same ({share:.1%}), mean log-probabilities within "
        f"{agreement.logprob_gap:.2g}"
    ]
    for one in agreement.different[:MAX_SHOWN]:
        lines += _difference(one)
    return [*lines, f"PROBLEM  {agreement.damage}"] if agreement.damage else lines


def _difference(one: Recaptioned) -> list[str]:
    stored, fresh = one.stored, one.fresh
    lines = [
        f"DIFFERS  {stored.ref.shard} index {stored.ref.index}, {stored.ref.key}",
        f"         stored {_answer(stored.caption, stored.error)}",
        f"         alone  {_answer(fresh.caption, fresh.error)}",
    ]
    token = one.difference
    if token is not None:
        lines.append(
            f"         from token {token.place}: {token.stored!r} (logit {token.stored_logit:.4f}) "
            f"or {token.fresh!r} ({token.fresh_logit:.4f}), {token.gap:.2g} apart"
        )
    elif stored.caption is not None and stored.caption != fresh.caption:
        lines.append("         this backend shows no logits")
    return lines


def _answer(caption: str | None, error: str | None) -> str:
    return f"error {error}" if caption is None else repr(caption)


def _json(found: Verification, agreement: Agreement | None, holds: bool) -> str:
    sampled = None
    if agreement is not None:
        sampled = {
            "rows": agreement.num_rows,
            "same": agreement.num_same,
            "largest_logprob_gap": agreement.logprob_gap,
            "damage": agreement.damage or None,
            "different": [_difference_json(one) for one in agreement.different],
        }
    return json.dumps(
        {
            "holds": holds,
            "shards": found.num_shards,
            "images": found.num_images,
            "rows": found.num_rows,
            "bytes": found.num_bytes,
            "seconds": round(found.seconds, 3),
            "problems": [asdict(problem) for problem in found.problems],
            "sample": sampled,
        },
        indent=2,
    )


def _difference_json(one: Recaptioned) -> dict[str, object]:
    token = one.difference
    return {
        "shard": one.stored.ref.shard,
        "index": one.stored.ref.index,
        "key": one.stored.ref.key,
        "stored": one.stored.caption,
        "fresh": one.fresh.caption,
        "token": None if token is None else {**asdict(token), "gap": token.gap},
    }
