"""Who waits, which slots are taken, and when to prefill; no tensors here."""

from __future__ import annotations

from collections import deque

from pipeline.engine.sequence import Sequence
from pipeline.records import Request


class Scheduler:
    """Keeps slots busy: admits waiting requests when about an eighth of the slots are free.

    Refilling at every freed slot would prefill for one row at a time; waiting for all slots
    (static batches) would leave most of them idle behind the longest caption.
    """

    def __init__(self, num_slots: int, prefill_batch: int, num_captions: int) -> None:
        assert num_slots >= num_captions, "a request's captions are admitted together"
        self.slots: list[Sequence | None] = [None] * num_slots
        self.waiting: deque[Request] = deque()
        self._num_captions = num_captions
        self._prefill_batch = min(prefill_batch, num_slots // num_captions)
        self._refill_at = max(num_captions, num_slots // 8)
        self.is_closed = False  # True once no further request will come

    @property
    def num_live(self) -> int:
        """How many slots hold a sequence."""
        return sum(sequence is not None for sequence in self.slots)

    @property
    def num_free(self) -> int:
        """How many slots hold none."""
        return len(self.slots) - self.num_live

    @property
    def num_wanted(self) -> int:
        """How many further requests should wait here, so that lengths can be matched."""
        return max(0, 2 * self._prefill_batch - len(self.waiting))

    @property
    def is_idle(self) -> bool:
        """True if nothing waits and nothing runs."""
        return not self.waiting and self.num_live == 0

    def can_prefill(self) -> bool:
        """True if nothing else can run, or if enough slots are free and enough requests wait.

        With a slow loader, requests come one by one: running them so would cost a prefill each.
        """
        if not self.waiting or self.num_live == 0:
            return bool(self.waiting)
        enough = min(self._prefill_batch, self._refill_at // self._num_captions)
        is_worth_it = self.is_closed or len(self.waiting) >= enough
        return is_worth_it and self.num_free >= self._refill_at

    def next_batch(self) -> list[Request]:
        """Take the request that waits longest, and those nearest to it in length."""
        size = min(self._prefill_batch, self.num_free // self._num_captions, len(self.waiting))
        oldest = self.waiting[0]
        by_distance = sorted(
            range(1, len(self.waiting)),
            key=lambda i: abs(len(self.waiting[i].prompt_ids) - len(oldest.prompt_ids)),
        )
        taken = {0, *by_distance[: size - 1]}
        batch = [request for i, request in enumerate(self.waiting) if i in taken]
        self.waiting = deque(r for i, r in enumerate(self.waiting) if i not in taken)
        return batch

    def free_slots(self, num_slots: int) -> list[int]:
        """Return the lowest free slots; they are taken once a sequence is placed in them."""
        free = [slot for slot, sequence in enumerate(self.slots) if sequence is None]
        assert len(free) >= num_slots, "more slots asked for than are free"
        return free[:num_slots]

    def place(self, sequence: Sequence, slot: int) -> None:
        """Give a free slot to a sequence."""
        assert self.slots[slot] is None, "the slot is taken"
        self.slots[slot] = sequence
        sequence.slot = slot

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's slot back."""
        assert self.slots[sequence.slot] is sequence, "the slot is another's"
        self.slots[sequence.slot] = None

    def gaps(self) -> list[tuple[int, int]]:
        """Moves (from, to) after which the live slots are the first ones."""
        num_live = self.num_live
        holes = [slot for slot in range(num_live) if self.slots[slot] is None]
        strays = [s for s in range(num_live, len(self.slots)) if self.slots[s] is not None]
        return list(zip(reversed(strays), holes, strict=True))

    def move(self, source: int, target: int) -> None:
        """Move a sequence to a free slot."""
        sequence = self.slots[source]
        assert sequence is not None, "an empty slot cannot be moved"
        self.slots[source] = None
        self.place(sequence, target)

    def live(self) -> list[Sequence]:
        """The live sequences in slot order."""
        return [sequence for sequence in self.slots if sequence is not None]
