"""The order in which people count: 2 before 10."""

from __future__ import annotations

import re


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which `a2` comes before `a10`, and no two texts are equal."""
    parts = re.split(r"([0-9]+)", text)
    keys = [(1, int(part), part) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
    return (*keys, (2, 0, text))
