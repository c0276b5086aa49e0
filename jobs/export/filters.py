"""Which rows are wanted: `--status ok`, `--min-logprob -1.5`, `--where 'width >= 512'`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import RequestError
from pipeline.records import STATUSES

CAPTIONED = tuple(status for status in STATUSES if status != "error")
_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(==|!=|<=|>=|!~|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One `--where`: a column held against a value; a row without a value never matches."""

    text: str
    column: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `COLUMN OPERATOR VALUE`; RequestError for anything else."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise RequestError(
                f"--where {text!r} is no condition; wanted one such as 'width >= 512', "
                "'format = JPEG' or 'caption ~ dog|cat'"
            )
        return cls(text, match[1], match[2], match[3].strip("'\""))

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """Return which rows match; RequestError for a column or value that does not fit."""
        if self.column not in table.column_names:
            names = ", ".join(table.column_names)
            raise RequestError(f"--where {self.text!r}: no column {self.column}; there are {names}")
        column = table.column(self.column)
        try:
            if self.operator.endswith("~"):
                found = pc.match_substring_regex(pc.cast(column, pa.string()), self.value)
                return pc.invert(found) if self.operator == "!~" else found
            value = pa.scalar(self.value).cast(
                pa.float64() if pa.types.is_floating(column.type) else column.type
            )
            return _COMPARE[self.operator](column, value)
        except pa.ArrowException as error:
            reason = " ".join(str(error).split())
            raise RequestError(f"--where {self.text!r}: {reason}") from None


@dataclass(frozen=True, slots=True)
class Filters:
    """All conditions; a row must meet each of them."""

    statuses: tuple[str, ...] = STATUSES
    min_logprob: float | None = None
    where: tuple[Condition, ...] = ()

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows that are wanted."""
        masks = [pc.is_in(table.column("status"), pa.array(self.statuses, pa.string()))]
        if self.min_logprob is not None:
            masks.append(pc.greater_equal(table.column("mean_logprob"), self.min_logprob))
        masks += [condition.mask(table) for condition in self.where]
        wanted = masks[0]
        for mask in masks[1:]:
            wanted = pc.and_(wanted, mask)
        return table.filter(pc.fill_null(wanted, False))


def filters_of(
    statuses: Sequence[str], default: Sequence[str], min_logprob: float | None, where: Sequence[str]
) -> Filters:
    """Build the filters that a command line asks for."""
    return Filters(
        tuple(statuses or default), min_logprob, tuple(Condition.parse(text) for text in where)
    )
