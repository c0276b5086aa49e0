"""Typed values of a table as the text that a prompt or a kept column shows.

Text is itself, a label its class name, true and false are those words, a date or time is in ISO
8601, and what has parts is JSON. A null is nothing: the field is missing.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Mapping, Sequence

import pyarrow as pa

from pipeline.input.columns import is_text


def values_of(column: pa.Array, labels: Sequence[str] = ()) -> list[object]:
    """Return a column's values as JSON has them; text that is no UTF-8 stays bytes."""
    if is_text(column.type):
        return list(map(_text_or_bytes, _as_bytes(column).to_pylist()))
    try:
        values = [_plain(value) for value in _without_nanoseconds(column).to_pylist()]
    except (UnicodeDecodeError, ValueError, OverflowError):  # deep inside; a year 300000
        return [_plain(_value_or_none(scalar)) for scalar in column]
    if labels:
        return [_label(value, labels) for value in values]
    return values


def field_bytes(value: object) -> bytes | None:
    """Return a value as the bytes that a member of a tar would hold; None for a null."""
    if value is None or isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json_text(value)
    return text.encode("utf-8", "surrogatepass")


def json_text(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _plain(value: object) -> object:
    """Return a value as JSON has it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


def _label(value: object, labels: Sequence[str]) -> object:
    """Return a class's name; the number that `datasets` has for no label is nothing."""
    if not isinstance(value, int) or value == -1:
        return None if value == -1 else value
    return labels[value] if 0 <= value < len(labels) else value


def _text_or_bytes(data: bytes | None) -> str | bytes | None:
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary())


def _without_nanoseconds(column: pa.Array) -> pa.Array:
    """Cast times to microseconds: Python has no finer ones, and Arrow refuses to drop them."""
    wanted = _coarse(column.type)
    if wanted == column.type:
        return column
    try:
        return column.cast(wanted, safe=False)
    except pa.ArrowNotImplementedError:
        return column


def _coarse(type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type) and type.unit == "ns":
        return pa.timestamp("us", type.tz)
    if pa.types.is_duration(type) and type.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(type):
        return pa.time64("us")
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_coarse(type.value_type)))
    if pa.types.is_struct(type):
        fields = [type.field(place) for place in range(type.num_fields)]
        return pa.struct([one.with_type(_coarse(one.type)) for one in fields])
    return type


def _value_or_none(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError):
        return None
