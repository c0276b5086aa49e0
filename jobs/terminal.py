"""Text for people: nothing from a shard or a network reaches the terminal raw."""

from __future__ import annotations


def printable(text: str) -> str:
    """Show control characters and other unprintable ones as escapes, so that none can act."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def bytes_text(count: float) -> str:
    """Return a size such as `8.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_text(seconds: float) -> str:
    """Return a time such as `3 s`, `2:05` or `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plural(count: int, noun: str) -> str:
    """Return `1 shard` or `2 shards`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
