"""`captionjob compare`: two models or prompts on the same images, in numbers and on a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jobs.compare.pairs import Comparison, RowPair, row_pairs
from jobs.joining import Join, join_shards, joined_rows, need_shards
from jobs.results import Output, read_output
from jobs.scores import Scores, score
from jobs.workers import log_names, read_lines
from pipeline.errors import RequestError
from pipeline.input.reader import ReaderSettings
from pipeline.output.folder import Where
from pipeline.output.job_record import JobRecord
from pipeline.prompts import fields_needed, kept_fields

KINDS = ("most different", "failed", "same", "random")


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """What the command line asks for."""

    out_a: Where
    out_b: Where
    shards: tuple[str, ...] = ()
    references: str | None = None  # a field of each sample
    max_pictures: int = 300
    seed: int = 0


@dataclass(slots=True)
class Compared:
    """Two outputs held together."""

    a: Output
    b: Output
    join: Join | None
    sums: Comparison
    scores: tuple[Scores, Scores] | None = None
    references: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # of shown rows

    @property
    def settings(self) -> list[str]:
        """What the two jobs were told differently."""
        other = JobRecord(self.b.record.settings)
        names = other.differences(self.a.record.settings)
        return [
            name.replace(" there, ", " in A, ").removesuffix(" now") + " in B" for name in names
        ]

    def measures(self) -> list[tuple[str, str, str]]:
        """Return the table: name, A's value, B's value."""
        a, b = self.sums.a, self.sums.b
        rows = [
            ("rows with a caption", f"{a.num_captions:,}", f"{b.num_captions:,}"),
            ("rows that are errors", f"{a.num_errors:,}", f"{b.num_errors:,}"),
            ("different captions", f"{len(a.captions):,}", f"{len(b.captions):,}"),
            ("words a caption", *_means(a.num_words, b.num_words, self)),
            ("tokens a caption", *_means(a.num_tokens, b.num_tokens, self)),
        ]
        if a.num_logprobs or b.num_logprobs:
            means = [
                f"{side.sum_logprob / side.num_logprobs:.3g}" if side.num_logprobs else "-"
                for side in (a, b)
            ]
            rows.append(("mean logprob", means[0], means[1]))
        rows.append(("images/s of a worker", _speed(self.a), _speed(self.b)))
        if self.scores:
            one, other = self.scores
            rows.append(("CIDEr-D", f"{one.cider_d:.3f}", f"{other.cider_d:.3f}"))
            rows.append(("BLEU-4", f"{one.bleu4:.3f}", f"{other.bleu4:.3f}"))
        return rows

    def to_json(self) -> str:
        """Return the numbers as one JSON object."""
        sums = self.sums
        scores = None
        if self.scores:
            scores = {
                name: {"images": one.num_images, "cider_d": one.cider_d, "bleu4": one.bleu4}
                for name, one in zip("ab", self.scores, strict=True)
            }
        return json.dumps(
            {
                "a": self.a.folder.url,
                "b": self.b.folder.url,
                "rows": sums.num_pairs,
                "only_a": sums.only_a,
                "only_b": sums.only_b,
                "same": sums.num_same,
                "word_overlap": round(sums.mean_overlap, 6),
                "settings": self.settings,
                "measures": {name: {"a": a, "b": b} for name, a, b in self.measures()},
                "scores": scores,
            },
            indent=2,
        )


def compare(request: CompareRequest) -> Compared:
    """Hold the two outputs together; RequestError where they have nothing in common."""
    if request.references is not None and not request.shards:
        raise RequestError("--references are fields of the shards: name their --shards")
    needed = fields_needed([request.references] if request.references else [])
    a, b = read_output(request.out_a), read_output(request.out_b)
    if a.num_captions != b.num_captions:
        raise RequestError(
            f"OUT_A has {a.num_captions} captions an image and OUT_B {b.num_captions}; "
            "wanted as many"
        )
    join = need_shards(join_shards(a, request.shards)) if request.shards else None
    compared = Compared(a, b, join, Comparison(request.max_pictures, request.seed))
    scored: list[tuple[RowPair, list[str]]] = []
    for shard_id, pairs in row_pairs(a, b, compared.sums):
        for pair in pairs:
            compared.sums.add(pair)
        if join is not None and request.references is not None:
            settings = ReaderSettings(needed)
            scored += _referenced(join, shard_id, pairs, request.references, settings)
    _score(compared, scored)
    return compared


def _score(compared: Compared, scored: Sequence[tuple[RowPair, list[str]]]) -> None:
    if scored:
        compared.scores = (
            score([(pair.a.caption or "", references) for pair, references in scored]),
            score([(pair.b.caption or "", references) for pair, references in scored]),
        )
        shown = {(pair.a.ref.shard, pair.a.ref.index) for pair, _ in compared.sums.shown()}
        compared.references = {
            place: references
            for pair, references in scored
            if (place := (pair.a.ref.shard, pair.a.ref.index)) in shown
        }


def _referenced(
    join: Join, shard_id: str, pairs: Sequence[RowPair], name: str, settings: ReaderSettings
) -> Iterator[tuple[RowPair, list[str]]]:
    """Yield a shard's pairs with their references, those without any left out."""
    by_place = {(pair.a.ref.index, pair.a.caption_index): pair for pair in pairs}
    rows = [pair.a for pair in pairs if not pair.has_error]
    for one in join.pairs:
        if one.result.id == shard_id:
            for sample, mine in joined_rows(one, rows, settings):
                references = references_of(kept_fields(sample, [name])[name])
                for row in mine if references else ():
                    yield by_place[row.ref.index, row.caption_index], references


def references_of(text: str | None) -> list[str]:
    """Read a field as references: a JSON list of texts, or one a line."""
    if not text:
        return []
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list):
            return [str(one) for one in found if str(one).strip()]
    return [line for line in text.splitlines() if line.strip()]


def kinds_of(compared: Compared) -> list[tuple[str, int]]:
    """Return the kinds of the shown pairs, and how many are of each."""
    counts = Counter(kind for _, kinds in compared.sums.shown() for kind in kinds)
    return [(kind, counts[kind]) for kind in KINDS if counts[kind]]


def _means(a: int, b: int, compared: Compared) -> tuple[str, str]:
    sums = compared.sums
    return (
        f"{a / max(1, sums.a.num_captions):.1f}",
        f"{b / max(1, sums.b.num_captions):.1f}",
    )


def _speed(output: Output) -> str:
    """Return images a second of a worker, over all runs that made the output."""
    images, seconds = 0, 0.0
    for name in log_names(output.folder):
        lines = read_lines(output.folder, name)
        if lines:
            images += lines[-1].snapshot.images
            seconds += lines[-1].snapshot.seconds
    return f"{images / seconds:.1f}" if seconds else "-"
