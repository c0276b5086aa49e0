"""An image's address from a template: every value is quoted, so that it stays one path."""

from __future__ import annotations

import re
from urllib.parse import quote

from pipeline.errors import RequestError
from pipeline.records import Row


def image_url(template: str, row: Row) -> str:
    """Fill `{key}`, `{member}`, `{shard}`, `{index}`, `{sha256}` or a kept column's name."""
    known = {
        "key": row.ref.key,
        "member": row.ref.member,
        "shard": row.ref.shard,
        "index": str(row.ref.index),
        "sha256": row.facts.sha256,
    }

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known and name not in row.kept:
            names = ", ".join([*known, *row.kept])
            raise RequestError(f"--image-url: no {{{name}}}; there are {names}")
        found = known[name] if name in known else row.kept[name]
        is_whole = match.span() == (0, len(template))  # '{json.url}' is an address as it is
        text = (found or "").encode("utf-8", "backslashreplace")
        return text.decode() if is_whole else quote(text, safe="/")

    return re.sub(r"\{([^{}]+)\}", value, template)
