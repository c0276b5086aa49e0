"""What a worker knows of all units of a job: which are over, held, or worth a try.

over     the shard has its file, or it cannot be read: nobody's business any more
held     another worker has the lease, as far as was seen
noted    a slice whose rows are committed, while its shard has no file yet
free     none of these: worth a try, which may show that it is over or held meanwhile
"""

from __future__ import annotations

import bisect
import random
from array import array
from collections.abc import Collection, Iterable, Sequence

from pipeline.input.dealing import Slice


class UnitIndex:
    """All units of a job in their order, and where each stands; it never changes."""

    def __init__(self, units: Sequence[Slice]) -> None:
        """Take the units in the order that all workers have."""
        self.units = units
        self.places = {unit.id: place for place, unit in enumerate(units)}
        self.siblings: dict[str, list[int]] = {}  # of cut shards: id -> places
        for place, unit in enumerate(units):
            if not unit.is_whole:
                self.siblings.setdefault(unit.shard.id, []).append(place)


class UnitMap:
    """The units by place; one thread looks and tries, any may note that a unit is over."""

    def __init__(self, index: UnitIndex) -> None:
        """Begin with all units free."""
        units = self.units = index.units
        self.held: set[int] = set()
        self.noted: set[int] = set()
        self.given_back: set[int] = set()  # by a worker that was stopped
        self.mine: set[int] = set()
        # Places that were not over when last tidied.
        self.left: Sequence[int] = range(len(units))
        self._over = bytearray(len(units))
        self._places = index.places
        self._siblings = index.siblings

    def place_of(self, unit: Slice) -> int:
        """Return where a unit stands."""
        return self._places[unit.id]

    def places_of(self, names: Iterable[str]) -> set[int]:
        """Return where the units of these names stand; others are left out."""
        return {self._places[name] for name in names if name in self._places}

    def siblings_of(self, shard_id: str) -> Collection[int]:
        """Return the places of a shard's slices, or of the shard where it is whole."""
        place = self._places.get(shard_id)
        return self._siblings.get(shard_id, ()) if place is None else (place,)

    def end(self, places: Iterable[int]) -> None:
        """Note that units are over."""
        for place in places:
            self._over[place] = True

    def is_over(self, place: int) -> bool:
        """Whether nothing is left to do, or to wait for."""
        return bool(self._over[place])

    def is_free(self, place: int) -> bool:
        """Whether a unit is worth a try."""
        return not (
            self._over[place]
            or place in self.held
            or place in self.mine
            or (place in self.noted and not self._is_orphaned(place))
        )

    def tidy(self) -> None:
        """Forget what is over."""
        if any(self._over):
            self.left = array("q", (place for place in self.left if not self._over[place]))

    def next_free(self, start: int) -> int | None:
        """Return the first free place from `start` on, and around."""
        left = self.left
        first = bisect.bisect_left(left, start)
        for number in range(len(left)):
            place = left[(first + number) % len(left)]
            if self.is_free(place):
                return place
        return None

    def anywhere(self, chance: random.Random) -> int:
        """Return some place that is perhaps not over."""
        return chance.choice(self.left) if self.left else 0

    def others(self) -> list[int]:
        """Return what is left and not this worker's: its holder may die."""
        return [place for place in self.left if not self._over[place] and place not in self.mine]

    def _is_orphaned(self, place: int) -> bool:
        """True for a slice whose siblings are all committed too, and yet there is no file.

        Whoever was to make it has died, or a piece was found wanting: one slice is done again.
        """
        siblings = self._siblings[self.units[place].shard.id]
        noted = [one for one in siblings if one in self.noted]
        return place == noted[0] and all(one in self.noted or self._over[one] for one in siblings)
