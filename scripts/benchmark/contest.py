"""Contenders against each other on one workload: in turns, so that a busy machine harms all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.benchmark.workload import Contender, Outcome, Workload


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender, how many images it gets, and the rival that it is one setting of.

    Slow ones get fewer images whose caption lengths are spread alike. Of the settings of one
    rival (batch sizes), the fastest of the first round plays on.
    """

    rival: str
    contender: Contender
    num_images: int
    dtype: str


@dataclass(slots=True)
class Standing:
    """What an entry has shown so far."""

    entry: Entry
    rates: list[float] = field(default_factory=list)  # images a second, one a round
    outcome: Outcome | None = None

    @property
    def rate(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many tokens of a contender's captions are those of ours, place by place."""

    num_tokens: int
    num_equal: int
    num_rows: int
    num_equal_rows: int
    num_equal_lengths: int

    @property
    def share(self) -> float:
        """The share of equal tokens."""
        return self.num_equal / max(1, self.num_tokens)


def compete(
    workload: Workload, entries: Sequence[Entry], num_rounds: int, tell: Callable[[str], None]
) -> list[Standing]:
    """Let every entry run once a round; the first entry is ours."""
    playing = [Standing(entry) for entry in entries]
    for number in range(num_rounds):
        for standing in playing:
            part = workload.subset(standing.entry.num_images)
            outcome = standing.entry.contender.run(part)
            rate = len(part) / outcome.seconds
            standing.rates.append(rate)
            standing.outcome = standing.outcome or outcome
            name = standing.entry.contender.name
            tell(f"round {number + 1}: {name}: {rate:.3f} images/s ({outcome.seconds:.1f} s)")
        playing = best_settings(playing)
    return playing


def best_settings(standings: Sequence[Standing]) -> list[Standing]:
    """Keep the fastest setting of each rival, in their order."""
    best: dict[str, Standing] = {}
    for standing in standings:
        known = best.get(standing.entry.rival)
        if known is None or standing.rate > known.rate:
            best[standing.entry.rival] = standing
    return list(best.values())


def ratio(ours: Standing, theirs: Standing) -> float:
    """How many times as fast ours is: the median over rounds, each against its own round."""
    return statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


def agreement(ours: Outcome, theirs: Outcome) -> Agreement:
    """Compare tokens of the requests that both have answered."""
    pairs = [(ours.tokens[i], tokens) for i, tokens in theirs.tokens.items()]
    return Agreement(
        num_tokens=sum(len(a) for a, _ in pairs),
        num_equal=sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False)),
        num_rows=len(pairs),
        num_equal_rows=sum(a == b for a, b in pairs),
        num_equal_lengths=sum(len(a) == len(b) for a, b in pairs),
    )
