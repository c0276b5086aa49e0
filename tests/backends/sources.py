"""Request sources for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipeline.records import Request


class ListSource:
    """All requests at hand; at most `burst` are given at a time, seeded, as a slow loader would."""

    def __init__(self, requests: Sequence[Request], burst: int = 1_000, seed: int = 0) -> None:
        self._requests = list(requests)
        self._burst = burst
        self._random = random.Random(seed)

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return a few; without `block`, perhaps none."""
        least = 1 if block else 0
        wanted = min(max_requests, self._random.randint(least, self._burst))
        taken, self._requests = self._requests[:wanted], self._requests[wanted:]
        return taken

    @property
    def is_exhausted(self) -> bool:
        """True once all were taken."""
        return not self._requests
