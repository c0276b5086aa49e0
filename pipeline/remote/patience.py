"""How long a store is waited for, and how often it is asked again.

    CAPTIONJOB_CONNECT_SECONDS   to connect                                       10
    CAPTIONJOB_STALL_SECONDS     without one byte of an answer                    30
    CAPTIONJOB_ATTEMPTS          in a row, before a shard or a write is given up   8
    CAPTIONJOB_MAX_WAIT_SECONDS  the longest pause between two attempts           30

They are environment variables, since every command that reads or writes a store obeys them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from pipeline.errors import RequestError

FIRST_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """Time-outs in seconds, and the number of attempts without progress."""

    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    attempts: int = 8
    max_wait_seconds: float = 30.0

    @classmethod
    def from_environment(cls) -> Patience:
        """Read the variables above; RequestError for one that is no positive number."""
        usual = cls()
        return cls(
            _number("CAPTIONJOB_CONNECT_SECONDS", usual.connect_seconds),
            _number("CAPTIONJOB_STALL_SECONDS", usual.stall_seconds),
            int(_number("CAPTIONJOB_ATTEMPTS", usual.attempts, least=1.0)),
            _number("CAPTIONJOB_MAX_WAIT_SECONDS", usual.max_wait_seconds),
        )

    def wait_after(self, num_failures: int, wanted: float | None = None) -> float:
        """Return the pause after so many failures in a row: twice as long each time, up to a bound.

        Half of it is by chance, so that a thousand workers do not come back in one moment. What
        the server `wanted` is obeyed up to the same bound.
        """
        longest = min(self.max_wait_seconds, FIRST_WAIT_SECONDS * 2.0 ** min(num_failures - 1, 30))
        pause = longest * random.uniform(0.5, 1.0)
        return min(self.max_wait_seconds, max(pause, wanted or 0.0))


def _number(name: str, default: float, *, least: float = 0.001) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= 86400:
        raise RequestError(f"{name}={text!r}: wanted a number from {least:g} to 86400")
    return number
