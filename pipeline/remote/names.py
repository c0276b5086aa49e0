"""Names in a store matched as a shell matches files: `*` stays in a folder, `**` does not."""

from __future__ import annotations

import fnmatch
import re

_MAGIC = re.compile(r"[*?[]")


def prefix_of(pattern: str) -> str:
    """Return what all names that match begin with."""
    match = _MAGIC.search(pattern)
    return pattern[: match.start()] if match else pattern


def pattern_of(pattern: str) -> re.Pattern[str]:
    """Return an expression for whole names. Names that begin with a dot want a dot written."""
    parts = pattern.split("/")
    expression = ""
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if part == "**":
            expression += r"(?:[^/.][^/]*/)*" + (r"[^/.][^/]*" if is_last else "")
            continue
        hides = r"(?!\.)" if part[:1] in ("*", "?", "[") else ""
        inner = re.sub(r"\*+", "*", part)
        expression += hides + _within_folder(inner) + ("" if is_last else "/")
    return re.compile(expression, re.DOTALL)


def _within_folder(part: str) -> str:
    """Translate one part of a path; what stands in for any character stands not for a slash."""
    translated = ""
    for piece in re.split(r"(\[[!^]?\]?[^\]]*\]|\*|\?)", part):
        if piece == "*":
            translated += "[^/]*"
        elif piece == "?":
            translated += "[^/]"
        elif piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
            translated += "(?!/)" + fnmatch.translate(piece).partition(":")[2].rpartition(")")[0]
        else:
            translated += re.escape(piece)
    return translated
