"""Lines of Parquet back to the records that the job made them from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from pipeline.output.schema import RowSchema
from pipeline.records import ImageFacts, Row, SampleRef

_FIXED = frozenset(RowSchema(num_captions=2).arrow().names)


def rows_of(table: pa.Table) -> Iterator[Row]:
    """Yield the records of a table of rows."""
    for batch in table.to_batches(max_chunksize=2048):
        for values in batch.to_pylist():
            yield row_of(values)


def row_of(values: Mapping[str, object]) -> Row:
    """Make the record of a line of Parquet; columns that are not ours are kept fields."""
    get = values.get
    return Row(
        ref=SampleRef(
            str(values["shard"]), _int(values["index"]), str(values["key"]), str(values["member"])
        ),
        facts=ImageFacts(
            width=_int(get("width")),
            height=_int(get("height")),
            format=str(get("format") or ""),
            sha256=str(get("sha256") or ""),
        ),
        status=str(values["status"]),
        caption_index=_int(get("caption_index")),
        caption=_text(get("caption")),
        error=_text(get("error")),
        error_detail=_text(get("error_detail")),
        finish_reason=_text(get("finish_reason")),
        num_prompt_tokens=_int(get("num_prompt_tokens")),
        num_caption_tokens=_int(get("num_caption_tokens")),
        mean_logprob=_float(get("mean_logprob")),
        kept={name: _text(value) for name, value in values.items() if name not in _FIXED},
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
