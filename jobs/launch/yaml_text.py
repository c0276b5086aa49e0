"""Plain data as YAML: mappings and lists in block style, every text quoted as in JSON.

Not PyYAML, whose rules of what needs no quotes are older than those of Kubernetes' reader: it
writes the text `1e3` bare, which comes back as a number there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

Data = str | int | bool | Mapping[str, "Data"] | Sequence["Data"]


def yaml_text(data: Data) -> str:
    """Return one document; a reader gives back equal data."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Data) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            inner = list(_lines(value))
            if _is_block(value):
                yield f"{key}:"
                yield from (f"  {line}" for line in inner)
            else:
                yield f"{key}: {inner[0]}"
    elif _is_block(data):
        assert not isinstance(data, str | int | Mapping)
        for value in data:
            first, *rest = _lines(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        # JSON's quoting is YAML's too, and no text is taken for a number, a date or a yes.
        text = json.dumps(data, ensure_ascii=False)
        yield "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _is_block(data: Data) -> bool:
    return not isinstance(data, str | int) and bool(data)
