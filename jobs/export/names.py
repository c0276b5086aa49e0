"""Keys to file names: they come from tars that nobody checked, and must stay in their folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

MAX_PART_BYTES = 180  # of one part of a path: file systems take 255, and an extension follows
_BAD = '<>:"|?*\\'  # what Windows does not take; datasets travel


@dataclass(slots=True)
class Names:
    """Gives each key a path of its own, the key itself wherever it can be one."""

    keeps_dots: bool = True  # False: a tar's readers end the key at the first dot
    _taken: set[str] = field(default_factory=set)

    def name(self, key: str) -> str:
        """Return a relative path without extension that no other key has been given."""
        base = safe_path(key, keeps_dots=self.keeps_dots)
        name, number = base, 2
        while name.casefold() in self._taken:
            name, number = f"{base}-{number}", number + 1
        self._taken.add(name.casefold())
        return name


def safe_path(key: str, *, keeps_dots: bool) -> str:
    """Return a key as a relative path that leads nowhere else and holds no control character."""
    parts = [part for part in key.split("/") if part not in ("", ".", "..")]
    safe = [_safe_part(part) for part in parts] or ["_"]
    if not keeps_dots:
        safe[-1] = safe[-1].replace(".", "_")
    return "/".join(safe)


def _safe_part(part: str) -> str:
    text = "".join("_" if _is_bad(char) else char for char in part)
    if text.startswith((".", "_")):  # hidden, or skipped by readers of folders
        text = f"x{text}"
    text = text.rstrip(". ") or "x"
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) > MAX_PART_BYTES:
        digest = hashlib.sha256(part.encode("utf-8", "backslashreplace")).hexdigest()[:8]
        text = f"{encoded[:MAX_PART_BYTES].decode('utf-8', 'ignore')}-{digest}"
    return text


def _is_bad(char: str) -> bool:
    return char in _BAD or not char.isprintable()
