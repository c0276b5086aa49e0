"""Which column of a Parquet file holds the images, which the keys, and which a prompt asks for.

The images are, unless the user names their column, what the first of these rules finds:

1. the columns that the `datasets` library noted as `Image` in the file's own metadata
2. those of its layout, a struct with `bytes` (and `path`)
3. those of plain bytes

A rule that finds two columns is no choice: the user is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.errors import ShardError
from pipeline.records import Columns

JSON_FIELD = "json"  # all columns together, unless one is called so
MAX_NAMED = 8  # columns in a message


class ColumnError(ShardError):
    """A Parquet file whose columns are not what was asked for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is read of each row."""

    image: str
    has_struct: bool  # {bytes, path}, or plain bytes
    key: str | None
    fields: Mapping[str, str]  # field name, lower case -> column
    json_columns: tuple[str, ...]  # that make up the field `json`, where it is asked for
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # column -> class names

    @property
    def read(self) -> list[str]:
        """The columns to read, each once."""
        names = [self.image, *self.fields.values(), *self.json_columns]
        return list(dict.fromkeys([*names, *([self.key] if self.key else [])]))


def layout_of(schema: pa.Schema, wanted: Columns, fields: Set[str] | None, url: str) -> Layout:
    """Choose the columns of a file; ColumnError where the choice is not clear.

    `fields` are the ones that prompt and kept columns need; None gives `json`, all columns. One
    that is no column is missing in each row, as it may be in a tar.
    """
    notes = _features(schema)
    image = wanted.image or _find_image(schema, notes, url)
    has_struct = _check_image(schema, image, url)
    if wanted.key is not None:
        _check_key(schema, wanted.key, url)
    others = [name for name in _readable(schema) if name != image]
    by_name: dict[str, str] = {}
    for name in others:
        by_name.setdefault(name.lower(), name)
    asked = {JSON_FIELD} if fields is None else fields
    found = {name: by_name[name] for name in sorted(asked) if name in by_name}
    needs_json = JSON_FIELD in asked and JSON_FIELD not in found
    return Layout(
        image=image,
        has_struct=has_struct,
        key=wanted.key,
        fields=found,
        json_columns=tuple(n for n in others if _is_telling(schema, n)) if needs_json else (),
        labels={name: _labels(note) for name, note in notes.items() if _labels(note)},
    )


def check_fields(schema: pa.Schema, layout: Layout, fields: Set[str], url: str) -> None:
    """Raise ColumnError for a field that no row can have, before any is read."""
    missing = sorted(fields - layout.fields.keys() - {JSON_FIELD})
    if missing:
        others = [name for name in _readable(schema) if name != layout.image]
        raise ColumnError(url, f"no column {missing[0]!r}; it has {_listed(others)}")


def _find_image(schema: pa.Schema, notes: Mapping[str, object], url: str) -> str:
    types = {name: schema.field(name).type for name in _readable(schema)}
    noted = [name for name in types if _kind(notes.get(name)) == "Image"]
    structs = [name for name, type in types.items() if _bytes_of(type) is not None]
    plain = [name for name, type in types.items() if is_bytes(type)]
    for found in (noted, structs, plain):
        if len(found) == 1:
            return found[0]
        if found:
            raise ColumnError(
                url,
                f"{_listed(found)} may hold the images; choose one with --image-column",
            )
    lists = [name for name, type in types.items() if _is_list_of_images(type)]
    if lists:
        raise ColumnError(url, _list_message(lists[0]))
    raise ColumnError(
        url, f"no column holds images (bytes, or a struct with bytes); it has {_listed(types)}"
    )


def _check_image(schema: pa.Schema, name: str, url: str) -> bool:
    """Return whether the image column is a struct; ColumnError if it holds no bytes at all."""
    type = _type(schema, name, "--image-column", url)
    if _is_list_of_images(type):
        raise ColumnError(url, _list_message(name))
    if not is_bytes(type) and _bytes_of(type) is None:
        raise ColumnError(
            url, f"the column {name!r} holds {type}; wanted bytes, or a struct with bytes"
        )
    return not is_bytes(type)


def _check_key(schema: pa.Schema, name: str, url: str) -> None:
    type = _value_type(_type(schema, name, "--key-column", url))
    if not (is_text(type) or pa.types.is_integer(type)):
        raise ColumnError(url, f"--key-column: {name!r} holds {type}; wanted text or whole numbers")


def _type(schema: pa.Schema, name: str, option: str, url: str) -> pa.DataType:
    count = len(schema.get_all_field_indices(name))
    if count != 1:
        what = f"{count} columns are called" if count else "no column"
        raise ColumnError(url, f"{option}: {what} {name!r}; it has {_listed(_readable(schema))}")
    return schema.field(name).type


def _readable(schema: pa.Schema) -> list[str]:
    """Return the columns that a name can tell apart."""
    return [name for name in schema.names if len(schema.get_all_field_indices(name)) == 1]


def _is_telling(schema: pa.Schema, name: str) -> bool:
    """Whether a column has a place in `json`: all but those with bytes somewhere in them."""
    return not _has_bytes(schema.field(name).type)


def is_bytes(type: pa.DataType) -> bool:
    """Whether values of a type are plain bytes."""
    type = _value_type(type)
    is_view = getattr(pa.types, "is_binary_view", lambda _: False)
    return bool(pa.types.is_binary(type) or pa.types.is_large_binary(type) or is_view(type))


def is_text(type: pa.DataType) -> bool:
    """Whether values of a type are text."""
    type = _value_type(type)
    is_view = getattr(pa.types, "is_string_view", lambda _: False)
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or is_view(type))


def _value_type(type: pa.DataType) -> pa.DataType:
    return type.value_type if pa.types.is_dictionary(type) else type


def _bytes_of(type: pa.DataType) -> pa.DataType | None:
    """Return the type of a struct's `bytes`, None if it has none."""
    if not pa.types.is_struct(type):
        return None
    found = [child.type for child in _children(type) if child.name == "bytes"]
    return found[0] if len(found) == 1 and is_bytes(found[0]) else None


def _is_list_of_images(type: pa.DataType) -> bool:
    if not hasattr(type, "value_type") or pa.types.is_dictionary(type):
        return False
    return is_bytes(type.value_type) or _bytes_of(type.value_type) is not None


def _has_bytes(type: pa.DataType) -> bool:
    if is_bytes(type) or pa.types.is_fixed_size_binary(type):
        return True
    return any(_has_bytes(child.type) for child in _children(type))


def _children(type: pa.DataType) -> list[pa.Field]:
    return [type.field(place) for place in range(type.num_fields)]


def _features(schema: pa.Schema) -> Mapping[str, object]:
    """Return what `datasets` noted of each column; nothing where its note makes no sense."""
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = found["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _kind(note: object) -> str:
    return str(note.get("_type")) if isinstance(note, dict) else ""


def _labels(note: object) -> tuple[str, ...]:
    names = note.get("names") if isinstance(note, dict) and _kind(note) == "ClassLabel" else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _list_message(name: str) -> str:
    return (
        f"the column {name!r} holds lists of images; wanted one image a row "
        "(split its rows first, or name another column with --image-column)"
    )


def _listed(names: Iterable[str]) -> str:
    found: Sequence[str] = list(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return (", ".join(map(repr, found[:MAX_NAMED])) or "no other columns") + more
