"""A prompt template and the fields of a sample make one prompt.

    "Describe {json.title} in one line."     a value inside KEY.json, with dots for depth
    "Rewrite this: {txt}"                    a whole field, KEY.txt
    "{key}"                                  the sample's own key;  {{ and }} are braces

The same names, without braces, are what `--keep` takes. Fields come from files that nobody
checked: what is no UTF-8 or no JSON costs a row, and control characters never reach a prompt.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import RequestError, SampleError
from pipeline.records import Sample

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_PART = r"[^\s.{}!:\[\]](?:[^.{}!:\[\]]*[^\s.{}!:\[\]])?"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")


@dataclass(frozen=True, slots=True)
class FieldName:
    """A name such as `json.title`: the field `json`, and the path `title` inside it."""

    text: str
    field: str
    path: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FieldName:
        """Split a name behind its part `json`, if it has one; RequestError if it is none."""
        if not _NAME.fullmatch(text):
            raise RequestError(
                f"{text!r} is not the name of a field; wanted one like txt, json.title or key"
            )
        parts = text.split(".")
        names = [part.lower() for part in parts]
        cut = names.index("json") + 1 if "json" in names else len(parts)
        return cls(text, ".".join(names[:cut]), tuple(parts[cut:]))


class PromptTemplate:
    """A prompt with places for a sample's fields, checked when it is built."""

    def __init__(self, text: str) -> None:
        """Parse `text`; RequestError, naming what is wrong, if it is no template."""
        self.text = text
        self._parts = _parse(text)

    @property
    def needs_fields(self) -> frozenset[str]:
        """The fields that the reader has to keep for this prompt, such as `json` and `txt`."""
        return fields_needed(part.text for part in self._parts if isinstance(part, FieldName))

    def render(self, sample: Sample) -> str:
        """Return the sample's prompt.

        Raises SampleError: `missing_field` where the sample lacks one, `bad_field` where one is
        no UTF-8 or no JSON.
        """
        values = _Values(sample)
        return "".join(
            part if isinstance(part, str) else clean(values.get(part)) for part in self._parts
        )


def fields_needed(names: Iterable[str]) -> frozenset[str]:
    """Return the fields that lie behind names such as `json.title`; `key` needs none."""
    return frozenset(FieldName.parse(name).field for name in names if name != "key")


def kept_fields(sample: Sample, names: Iterable[str]) -> Mapping[str, str | None]:
    """Return the pass-through columns of a sample's row; what is missing or broken is None."""
    values = _Values(sample)
    kept: dict[str, str | None] = {}
    for name in names:
        try:
            kept[name] = values.get(FieldName.parse(name))
        except SampleError:
            kept[name] = None
    return kept


def clean(text: str) -> str:
    """Make a value one line: white space becomes a blank, other control characters go.

    So go unpaired surrogates, and marks that turn the direction of text around.
    """
    text = " ".join(text.split())
    return "".join(char for char in text if not _is_control(char))


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs") or "\u202a" <= char <= "\u202e"


def _parse(text: str) -> list[str | FieldName]:
    parts: list[str | FieldName] = []
    end = 0
    for match in _TOKEN.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        token = match[0]
        if token in ("{{", "}}"):
            parts.append(token[0])
        elif match[1] is None:
            raise RequestError(
                f"--prompt has a lone {token!r} at character {match.start() + 1}; "
                f"wanted {{FIELD}}, or {token * 2} for a brace"
            )
        else:
            try:
                parts.append(FieldName.parse(match[1]))
            except RequestError as error:
                raise RequestError(f"--prompt: in {token}, {error}") from None
    parts.append(text[end:])
    return [part for part in parts if part != ""]


class _Values:
    """A sample's values by name; its JSON is parsed once."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._parsed: dict[str, object] = {}

    def get(self, name: FieldName) -> str:
        """Return a value as text; SampleError where there is none."""
        if name.text == "key":
            return self._sample.ref.key
        data = self._sample.fields.get(name.field)
        if data is None:
            raise SampleError("missing_field", f"no member {self._sample.ref.key}.{name.field}")
        if not name.path:
            return _text(data, name)
        if name.field not in self._parsed:
            self._parsed[name.field] = _json(data, name)
        value = self._parsed[name.field]
        for part in name.path:
            value = _step(value, part)
        if value is None:
            raise SampleError("missing_field", f"no {name.text} in {self._sample.ref.key}.json")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _step(value: object, part: str) -> object:
    """Go one step into a JSON value; None where there is nothing."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and part.isascii() and part.isdigit() and len(part) < 10:
        return value[int(part)] if int(part) < len(value) else None
    return None


def _text(data: bytes, name: FieldName) -> str:
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise SampleError("bad_field", f"{name.field} is not UTF-8: {error.reason}") from None


def _json(data: bytes, name: FieldName) -> object:
    text = _text(data, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleError("bad_field", f"{name.field} is not JSON: {error}") from None
