"""Who waits, which slots are taken, and when to prefill; no tensors here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows

from pipeline.engine.sequence import Sequence


class Scheduler:
    """Keeps slots busy: admits waiting sequences when about an eighth of the slots are free.

    Refilling at every freed slot would prefill for one row at a time; waiting for all slots
    (static batches) would leave most of them idle behind the longest caption.

    `max_live` and `prefill_batch` start at what was asked for, and shrink for good where
    memory does not suffice.
    """

    def __init__(self, num_slots: int, prefill_batch: int, num_captions: int) -> None:
        assert num_slots >= num_captions, "a request's captions are admitted together"
        self.slots: list[Sequence | None] = [None] * num_slots
        self.waiting: deque[Sequence] = deque()
        self.is_closed = False  # True once no further request will come
        self.max_live = num_slots
        self.prefill_batch = max(1, min(prefill_batch, num_slots // num_captions))
        self._num_captions = num_captions

    @property
    def num_live(self) -> int:
        """How many slots hold a sequence."""
        return sum(sequence is not None for sequence in self.slots)

    @property
    def num_free(self) -> int:
        """How many sequences more may run."""
        return self.max_live - self.num_live

    @property
    def num_wanted(self) -> int:
        """How many further requests should wait here, so that lengths can be matched."""
        return max(0, 2 * self.prefill_batch - len(self.waiting))

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
        refill_at = max(self._num_captions, self.max_live // 8)
        enough = min(self.prefill_batch, refill_at // self._num_captions)
        is_worth_it = self.is_closed or len(self.waiting) >= enough
        return is_worth_it and self.num_free >= refill_at

    def next_batch(self) -> list[Sequence]:
        """Take the sequence that waits longest, and those nearest to it in length."""
        oldest = self.waiting[0].num_prefix_tokens
        by_distance = sorted(
            range(len(self.waiting)),
            key=lambda i: (i > 0, abs(self.waiting[i].num_prefix_tokens - oldest)),
        )
        taken: set[int] = set()
        room = self.num_free
        for i in by_distance:
            if len(taken) == self.prefill_batch or self.waiting[i].num_siblings >= room:
                break
            taken.add(i)
            room -= 1 + self.waiting[i].num_siblings
        batch = [sequence for i, sequence in enumerate(self.waiting) if i in taken]
        self.waiting = deque(s for i, s in enumerate(self.waiting) if i not in taken)
        return batch

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait again, before all others; any slots they had are free."""
        for sequence in sequences:
            if sequence.slot >= 0:
                self.release(sequence)
        self.waiting.extendleft(reversed(list(sequences)))

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
        sequence.slot = -1

    def close_gaps(self, borders: Rows[int]) -> Iterator[tuple[int, int]]:
        """Move sequences until the live slots are the first ones; yield each move (from, to).

        A gap is filled with the longest sequence of the next group of slots, the gap that this
        leaves in the same way, and so on to the last one. Sequences so drift to the front as
        they grow, and groups stay apart by length. `borders` are those of the groups.
        """
        for gap in self._gaps():
            target = gap
            while (source := self._filler(target, borders)) is not None:
                sequence = self.slots[source]
                assert sequence is not None, "an empty slot cannot be moved"
                self.slots[source] = None
                self.place(sequence, target)
                yield source, target
                target = source

    def _gaps(self) -> Iterator[int]:
        """Yield the first free slot before a live one, until there is none."""
        while True:
            gap = next(slot for slot, s in enumerate([*self.slots, None]) if s is None)
            if all(sequence is None for sequence in self.slots[gap:]):
                return
            yield gap

    def _filler(self, gap: int, borders: Rows[int]) -> int | None:
        """Return the slot of the sequence that goes into a gap; None if none lies behind it."""
        live = [slot for slot in range(gap + 1, len(self.slots)) if self.slots[slot] is not None]
        if not live:
            return None
        end = next((border for border in borders if border > gap), len(self.slots))
        behind = [slot for slot in live if slot >= end]
        if not behind:
            return live[-1]
        group_end = next((border for border in borders if border > behind[0]), len(self.slots))
        group = [slot for slot in behind if slot < group_end]
        return max(group, key=self._num_tokens)

    def _num_tokens(self, slot: int) -> int:
        sequence = self.slots[slot]
        return 0 if sequence is None else sequence.num_prefix_tokens

    def live(self) -> list[Sequence]:
        """The live sequences in slot order."""
        return [sequence for sequence in self.slots if sequence is not None]
