"""`--dedupe`: of the identical images of a shard, one goes through the network for all.

Two samples are doubles if their images have the same bytes and their prompts the same text. The
first whose turn comes is prepared and captioned; each later one waits for its rows, or gets
copies of them at once, under its own index, key, member and kept fields. An error is copied too.

    a.jpg ──► Request ─────────► captioner ──► Row of a ──► store
    b.jpg ──► Double ── waits ──────────────────┴─► Row of b ──► store

A double in an earlier run's piece is gone with that run, so the caption may not depend on who was
first: the network knows such a request by its content, not by its key. Greedy captions are what
they are without `--dedupe`; sampled ones draw their numbers from the content.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.records import Row, Sample, SampleRef


@dataclass(frozen=True, slots=True)
class Double:
    """A sample whose rows are those of another one of its shard, but for these columns."""

    ref: SampleRef
    kept: Mapping[str, str | None]
    content: str

    @property
    def known_as(self) -> SampleRef:
        """What the network is told: the content in place of the key."""
        return replace(self.ref, key=self.content)

    def copy(self, row: Row) -> Row:
        """Return another's row as this sample's own."""
        return replace(row, ref=self.ref, kept=self.kept, is_copy=True)


@dataclass(slots=True)
class _First:
    """The sample that is captioned, its rows so far, and who waits for more of them."""

    ref: SampleRef
    rows: list[Row] = field(default_factory=list)
    waiting: list[Double] = field(default_factory=list)


class Doubles:
    """Who was first; for the shards in work only, whose samples come in shard order."""

    def __init__(self, num_captions: int) -> None:
        """Expect so many rows of each image."""
        self._num_captions = num_captions
        self._lock = threading.Lock()
        self._firsts: dict[str, dict[str, _First]] = {}  # shard id -> content -> who was first
        self._in_work: dict[tuple[str, int], _First] = {}  # of a first: its rows are to come
        self._joining: dict[tuple[str, int], _First] = {}  # of a double: its turn is to come
        self._shard = ""  # of the last sample that came back in order

    def is_first(self, double: Double) -> bool:
        """Note a sample; True if it is the one to be captioned. On any loader thread."""
        place = double.ref.shard, double.ref.index
        with self._lock:
            firsts = self._firsts.setdefault(double.ref.shard, {})
            first = firsts.get(double.content)
            if first is not None:
                self._joining[place] = first
                return False
            firsts[double.content] = self._in_work[place] = _First(double.ref)
            return True

    def enter(self, shard: str) -> None:
        """Note that a sample of this shard came back: none of an earlier shard will follow."""
        if shard != self._shard:
            with self._lock:
                self._firsts.pop(self._shard, None)
            self._shard = shard

    def join(self, double: Double) -> list[Row]:
        """Return the rows that are there already; `settle` returns those that are to come."""
        with self._lock:
            first = self._joining.pop((double.ref.shard, double.ref.index))
        if len(first.rows) < self._num_captions:
            first.waiting.append(double)
        return [double.copy(row) for row in first.rows]

    def settle(self, row: Row) -> list[Row]:
        """Return a row under its own key again, and the copies that waited for it."""
        place = row.ref.shard, row.ref.index
        with self._lock:
            first = self._in_work.get(place)
        if first is None:
            return [row]
        row = replace(row, ref=first.ref)
        copies = [double.copy(row) for double in first.waiting]
        first.rows.append(row)
        if len(first.rows) == self._num_captions:
            first.waiting.clear()
            with self._lock:
                del self._in_work[place]
        return [row, *copies]


def content_of(sample: Sample, prompt: str) -> str:
    """Return what doubles have in common: the hash of an image's bytes and of its prompt."""
    digest = hashlib.sha256(hashlib.sha256(sample.data).digest())
    digest.update(prompt.encode("utf-8", "surrogatepass"))
    return f"sha256:{digest.hexdigest()}"
