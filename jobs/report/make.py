"""`captionjob report`: gather, choose, read pictures, draw, and write one file."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.corrections import Correction, key_of, latest_corrections
from jobs.joining import Join, join_shards, need_shards
from jobs.report.choose import KINDS, Choice, choose
from jobs.report.gather import Facts, gather
from jobs.report.page import render, trusted
from jobs.report.plots import plots_of
from jobs.report.thumbnails import Thumbnails, make_thumbnails
from jobs.report.timeline import Timeline, read_timeline
from jobs.results import Output, read_output
from jobs.status import read_failed
from jobs.terminal import plural
from pipeline.errors import JobError, RequestError
from pipeline.output.folder import Where
from pipeline.records import STATUSES, Row

MAX_PICTURES = 500


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What the command line asks for."""

    out: Where
    shards: tuple[str, ...]
    to: Path
    max_pictures: int = MAX_PICTURES
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What was written."""

    path: Path
    num_bytes: int
    num_rows: int
    num_pictures: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class Card:
    """One row of the gallery."""

    row: Row
    kinds: tuple[str, ...]
    num_same: int
    uri: str
    correction: Correction | None

    @property
    def caption(self) -> str:
        """The caption that counts."""
        return self.correction.corrected_caption if self.correction else self.row.caption or ""

    @property
    def details(self) -> list[tuple[str, str]]:
        """All that is known of the row."""
        return details_of(self.row)


def make_report(request: ReportRequest) -> Report:
    """Write the page; RequestError where the request is wrong."""
    if request.to.is_dir() or not request.to.absolute().parent.is_dir():
        raise RequestError(f"--to {str(request.to)!r}: wanted a file in a folder that exists")
    output = read_output(request.out)
    if not output.num_rows:
        raise RequestError(f"OUT {output.folder.url!r} holds no rows yet")
    join = need_shards(join_shards(output, request.shards))
    facts = gather(output)
    choices = choose(output, join.pairs, facts, request.max_pictures, request.seed)
    thumbnails = make_thumbnails(join.pairs, [choice.row for choice in choices])
    page = _page(output, join, facts, choices, thumbnails)
    num_bytes = write_page(request.to, page)
    return Report(request.to, num_bytes, facts.num_rows, len(thumbnails.uris), facts)


def write_page(path: Path, page: str) -> int:
    """Put a page under its name, whole or not at all; return its bytes."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(4)}-{path.name}")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def details_of(row: Row) -> list[tuple[str, str]]:
    """Return a row's columns as names and texts, those without a value left out."""
    facts = row.facts
    size = f"{facts.width} × {facts.height}" if facts.width else None
    found: list[tuple[str, object]] = [
        ("key", row.ref.key),
        ("shard", row.ref.shard),
        ("index", row.ref.index),
        ("member", row.ref.member),
        ("status", row.status),
        ("finish reason", row.finish_reason),
        ("error", row.error),
        ("error detail", row.error_detail),
        ("caption index", row.caption_index or None),
        ("mean logprob", row.mean_logprob),
        ("caption tokens", row.num_caption_tokens),
        ("prompt tokens", row.num_prompt_tokens),
        ("size", size),
        ("format", facts.format or None),
        ("sha256", facts.sha256 or None),
        *row.kept.items(),
    ]
    return [
        (name, f"{value:.4g}" if isinstance(value, float) else str(value))
        for name, value in found
        if value is not None
    ]


def _page(
    output: Output, join: Join, facts: Facts, choices: Sequence[Choice], thumbnails: Thumbnails
) -> str:
    timeline = read_timeline(output.folder)
    cards = _cards(output, choices, thumbnails)
    counts = Counter(kind for card in cards for kind in card.kinds)
    num_unfinished = len(output.shards) - len(output.done)
    return render(
        "report.html",
        title=output.folder.title,
        model=output.model,
        fingerprint=output.record.fingerprint,
        facts=facts,
        num_shards=len(output.shards),
        num_unfinished=num_unfinished,
        expected="so far" if num_unfinished else "",
        speed=_speed(timeline),
        runs="" if timeline is None else plural(timeline.num_workers, "worker's run"),
        notes=_notes(output, join, thumbnails),
        plots=[
            {"title": one.title, "summary": one.summary, "svg": trusted(one.svg)}
            for one in plots_of(facts, timeline)
        ],
        failed=read_failed(output.folder),
        kinds=[(kind, counts[kind]) for kind in KINDS if counts[kind]],
        statuses=[status for status in STATUSES if facts.statuses[status]],
        cards=cards,
        settings=settings_of(output),
    )


def settings_of(output: Output) -> list[tuple[str, str]]:
    """Return the job's settings as names and texts."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in output.record.settings.items()
    ]


def _cards(output: Output, choices: Sequence[Choice], thumbnails: Thumbnails) -> list[Card]:
    corrections = latest_corrections(output.folder)
    return [
        Card(
            choice.row,
            choice.kinds,
            choice.num_same,
            thumbnails.uris.get((choice.row.ref.shard, choice.row.ref.index), ""),
            corrections.get(key_of(choice.row)),
        )
        for choice in choices
    ]


def _speed(timeline: Timeline | None) -> str:
    """Return images a second of all workers together, while they ran."""
    if timeline is None or not timeline.total.seconds:
        return ""
    rate = timeline.total.images_per_second
    return f"{rate:.1f}" if timeline.num_workers == 1 else f"{rate:.1f} each"


def _notes(output: Output, join: Join, thumbnails: Thumbnails) -> list[str]:
    notes = [f"not counted: {fault.name}: {fault.reason}" for fault in output.faults]
    if join.without_shard:
        notes.append(
            f"pictures are of {len(join.pairs)} of {len(output.shards)} shards: "
            "the others are not in --shards"
        )
    return notes + [f"some pictures are missing: {note}" for note in thumbnails.notes]
