"""Prefills and steps that run ahead of the host: their tokens are chosen, and not yet read.

    the GPU    | step 7 | step 8 | step 9 |
    the host        queues 8, reads 7 | queues 9, reads 8     (a lag of 1)

The chosen ids stay on the device and feed the next step (`Said`), so nobody waits for them.
When the host reads a step, it settles what had ended by then. A sequence that ended has run once
for each step queued since; those tokens are thrown away. A sequence that ends by its length is
known to before it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from pipeline.engine.device import Chosen
from pipeline.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """A prefill or a step: who stood in each row as it was queued, None where nobody did."""

    rows: tuple[Sequence | None, ...]
    read: Callable[[], Chosen]
    is_decode: bool

    def land(self) -> list[tuple[Sequence, int, float]]:
        """Read the tokens; return those of the sequences that have not ended in the meantime."""
        return [
            (sequence, token, logprob)
            for sequence, token, logprob in zip(self.rows, *self.read(), strict=True)
            if sequence is not None and sequence.finish_reason is None and sequence.error is None
        ]


class InFlight:
    """What was queued and not read, oldest first; `lag` of them may stay so."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._flights: deque[Flight] = deque()

    def queue(
        self, rows: Rows[Sequence | None], read: Callable[[], Chosen], *, is_decode: bool
    ) -> None:
        """Note that each of these sequences has a token more, whatever it is."""
        for sequence in rows:
            if sequence is not None:
                sequence.num_chosen += 1
        self._flights.append(Flight(tuple(rows), read, is_decode))

    def due(self) -> Iterator[Flight]:
        """Take those that the host should read by now."""
        return self._taken(self._lag)

    def next(self) -> Iterator[Flight]:
        """Take the oldest, if there is one: nothing is left to run beside it."""
        return self._taken(max(0, len(self._flights) - 1))

    def all(self) -> Iterator[Flight]:
        """Take all: somebody is about to be moved out, with all that it has said."""
        return self._taken(0)

    def forget(self) -> None:
        """Throw away what is in flight when every sequence has ended."""
        self._flights.clear()

    def _taken(self, num_left: int) -> Iterator[Flight]:
        while len(self._flights) > num_left:
            yield self._flights.popleft()
