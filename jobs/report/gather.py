"""What a page tells of a job's rows, gathered in one pass over the columns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.alarms import COLUMNS, Alarm, AlarmBell, bell_of
from jobs.results import Output
from pipeline.records import STATUSES

MAX_LISTED = 15
MAX_ERROR_EXAMPLES = 4
OPENING_WORDS = 3
_COLUMNS = (
    *COLUMNS,
    *("error", "error_detail", "num_caption_tokens", "mean_logprob"),
)


@dataclass(frozen=True, slots=True)
class Counted:
    """A text and how many rows have it."""

    text: str
    count: int
    share: float  # of the captions


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """An error code with some of its rows: key and detail."""

    code: str
    count: int
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """A job's rows in numbers. The arrays have one place a row, in the order of the shards."""

    num_rows: int
    statuses: Counter[str]
    errors: tuple[ErrorKind, ...]
    status_codes: npt.NDArray[np.int8]  # places in STATUSES
    num_tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]  # NaN where there is none
    captions: Counter[str]
    openings: tuple[Counted, ...]
    alarms: tuple[Alarm, ...]

    @property
    def num_captions(self) -> int:
        """Rows that have a caption."""
        return self.num_rows - self.statuses["error"]

    def share(self, status: str) -> float:
        """Return the share of rows that have a status."""
        return self.statuses[status] / self.num_rows if self.num_rows else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean length of the captions in tokens."""
        lengths = self.num_tokens[self.status_codes != STATUSES.index("error")]
        return float(lengths.mean()) if len(lengths) else 0.0

    @property
    def mean_logprob(self) -> float | None:
        """Mean of the rows' mean log-probabilities."""
        known = self.logprobs[~np.isnan(self.logprobs)]
        return float(known.mean()) if len(known) else None

    @property
    def repeated(self) -> tuple[Counted, ...]:
        """The captions that most rows share."""
        return tuple(_counted(self.captions, self.num_captions, least=2))


@dataclass(slots=True)
class _Gathering:
    """The numbers while they grow."""

    bell: AlarmBell
    statuses: Counter[str] = field(default_factory=Counter)
    captions: Counter[str] = field(default_factory=Counter)
    openings: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    status_codes: list[npt.NDArray[np.int8]] = field(default_factory=list)
    num_tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def look(self, table: pa.Table) -> None:
        self.bell.look(table)
        statuses = table.column("status").to_pylist()
        self.statuses.update(statuses)
        codes = [STATUSES.index(status) for status in statuses]
        self.status_codes.append(np.array(codes, np.int8))
        self.num_tokens.append(table.column("num_caption_tokens").to_numpy().astype(np.int32))
        self.logprobs.append(table.column("mean_logprob").to_numpy().astype(np.float32))
        for caption in table.column("caption").to_pylist():
            if caption is not None:
                self.captions[caption] += 1
                self.openings[" ".join(caption.split()[:OPENING_WORDS])] += 1
        self._look_at_errors(table)

    def _look_at_errors(self, table: pa.Table) -> None:
        columns = [table.column(name).to_pylist() for name in ("error", "key", "error_detail")]
        for code, key, detail in zip(*columns, strict=True):
            if code:
                self.errors[code] += 1
                examples = self.examples.setdefault(code, [])
                if len(examples) < MAX_ERROR_EXAMPLES:
                    examples.append((key, detail or ""))

    def facts(self) -> Facts:
        num_captions = sum(self.captions.values())
        return Facts(
            num_rows=sum(self.statuses.values()),
            statuses=self.statuses,
            errors=tuple(
                ErrorKind(code, count, tuple(self.examples[code]))
                for code, count in self.errors.most_common()
            ),
            status_codes=np.concatenate([np.zeros(0, np.int8), *self.status_codes]),
            num_tokens=np.concatenate([np.zeros(0, np.int32), *self.num_tokens]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            captions=self.captions,
            openings=tuple(_counted(self.openings, num_captions, least=2)),
            alarms=self.bell.alarms(),
        )


def gather(output: Output) -> Facts:
    """Read the columns that a page needs of all rows that are there by now."""
    gathering = _Gathering(bell_of(output))
    for shard in output.shards:
        gathering.look(shard.table(_COLUMNS))
    return gathering.facts()


def _counted(counter: Counter[str], total: int, least: int) -> list[Counted]:
    return [
        Counted(text, count, count / max(1, total))
        for text, count in counter.most_common(MAX_LISTED)
        if count >= least
    ]
