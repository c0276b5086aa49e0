"""The columns of the output: one fixed, explicit schema for every shard of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.errors import RequestError
from pipeline.records import Row

SCHEMA_VERSION = 1

_TEXT = pa.string()
# Column, type, may it be null, and its value. Facts that an image does not tell are null.
_COLUMNS: tuple[tuple[str, pa.DataType, bool, Callable[[Row], object]], ...] = (
    ("shard", _TEXT, False, lambda row: row.ref.shard),
    ("index", pa.int64(), False, lambda row: row.ref.index),
    ("caption_index", pa.int32(), False, lambda row: row.caption_index),
    ("key", _TEXT, False, lambda row: row.ref.key),
    ("member", _TEXT, False, lambda row: row.ref.member),
    ("caption", _TEXT, True, lambda row: row.caption),
    ("status", _TEXT, False, lambda row: row.status),
    ("error", _TEXT, True, lambda row: row.error),
    ("error_detail", _TEXT, True, lambda row: row.error_detail),
    ("finish_reason", _TEXT, True, lambda row: row.finish_reason),
    ("num_prompt_tokens", pa.int32(), False, lambda row: row.num_prompt_tokens),
    ("num_caption_tokens", pa.int32(), False, lambda row: row.num_caption_tokens),
    ("mean_logprob", pa.float32(), True, lambda row: row.mean_logprob),
    ("width", pa.int32(), True, lambda row: row.facts.width or None),
    ("height", pa.int32(), True, lambda row: row.facts.height or None),
    ("format", _TEXT, True, lambda row: row.facts.format or None),
    ("sha256", _TEXT, True, lambda row: row.facts.sha256 or None),
)


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The columns of one job: `caption_index` only with several captions, then the kept fields."""

    num_captions: int = 1
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        taken = {name for name, *_ in _COLUMNS}
        for name in self.kept:
            if name in taken:
                raise RequestError(f"--keep {name}: the output has a column of that name already")
            taken.add(name)

    def arrow(self, metadata: dict[str, str] | None = None) -> pa.Schema:
        """Return the Arrow schema, with metadata for the file."""
        fields = [pa.field(name, kind, null) for name, kind, null, _ in self._columns()]
        fields += [pa.field(name, _TEXT, True) for name in self.kept]
        return pa.schema(fields, metadata=metadata)

    def table(self, rows: Sequence[Row]) -> pa.Table:
        """Return rows as a table, in the order of index and caption index."""
        ordered = sorted(rows, key=lambda row: (row.ref.index, row.caption_index))
        arrays = [
            _array([value(row) for row in ordered], kind) for _, kind, _, value in self._columns()
        ]
        arrays += [_array([row.kept.get(name) for row in ordered], _TEXT) for name in self.kept]
        return pa.Table.from_arrays(arrays, schema=self.arrow())

    def _columns(
        self,
    ) -> list[tuple[str, pa.DataType, bool, Callable[[Row], object]]]:
        return [one for one in _COLUMNS if self.num_captions > 1 or one[0] != "caption_index"]


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half of a surrogate pair is no text; shown as an escape
        return pa.array([_encodable(value) for value in values], kind)


def _encodable(value: object) -> object:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
