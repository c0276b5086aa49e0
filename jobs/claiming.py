"""Which unit of work this worker takes next, when workers take them one by one.

Each worker begins at a place of its own and goes on in the list's order, so that workers seldom
meet. Where it runs into another's it jumps to some place that it does not know to be taken: a
wrong guess costs one request or two. Only when guesses have cost as much as a listing of the
folder does it list. So a job of a million shards is listed a few times by each worker, and no
file is looked at that need not be. Where many fight for the last units they pause, ever longer.

Once all is over or held it watches the leases of the others, and takes what one that has died
or was stopped left behind; a look costs one listing of the leases, however many shards there are.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jobs.ticker import Ticker
from jobs.unit_map import UnitIndex, UnitMap
from pipeline.errors import CaptionJobError, JobError, RequestError
from pipeline.input.dealing import Slice
from pipeline.output import leases
from pipeline.output.leases import CLAIMS, ClaimNames, Lease, LeaseFolder

BEATS = 4  # that a lease may live through before it is silent
FIRST_LOOK_SECONDS = 0.5  # between looks at others' leases; it grows
MIN_MISSES = 3  # before the leases are listed again,
NAMES_A_MISS = 1000  # and for each so many units one more before the folder is: as it costs
MAX_TRIES = 5  # of one unit by one worker, which takes it again where it was left unfinished


class Clock(Protocol):
    """Time as the worker feels it."""

    def now(self) -> float:
        """Return seconds on a clock that is this worker's own, and never set back."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Wait; False, at once, if the run is to end."""
        ...


@dataclass(frozen=True, slots=True)
class ClaimSettings:
    """How long a lease may be silent before its unit is taken over."""

    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.lease_seconds >= 1:
            raise RequestError(f"--lease-seconds is {self.lease_seconds:g}; wanted 1 or more")


@dataclass(slots=True)
class ClaimCounters:
    """What claiming did, and cost."""

    taken: int = 0
    misses: int = 0  # tries of what was over, or another's
    listings: int = 0
    taken_over: int = 0
    lost: int = 0
    idle_seconds: float = 0.0


@dataclass(slots=True)
class _Sight:
    """A lease of another worker as it was seen last, and since when it has been so."""

    state: tuple[int, str]  # generation, version
    since: float


class Claims:
    """This worker's claims; `take` on one thread, the rest on any."""

    def __init__(
        self,
        folder: LeaseFolder,
        units: UnitIndex | Sequence[Slice],
        worker: str,
        clock: Clock,
        *,
        job: str = "",
        start: int = 0,
        settings: ClaimSettings | None = None,
    ) -> None:
        """Claim for `worker`, beginning at the place `start` of `units`.

        `job` is what the workers of one start have in common: they don't try again what one
        of them could not read.
        """
        self.counters = ClaimCounters()
        self.settings = settings or ClaimSettings()
        self._folder = folder
        self._map = UnitMap(units if isinstance(units, UnitIndex) else UnitIndex(units))
        self._worker = worker
        self._clock = clock
        self._tag = leases.tag_of(job or worker)
        self._start = start
        self._old_failures: dict[str, set[str]] | None = None  # which this run is to try again
        self._leases: dict[str, Lease] = {}  # this worker's
        self._sights: dict[str, _Sight] = {}
        self._tries: Counter[str] = Counter()
        self._num_beats = 0
        self.is_waiting = False  # for other workers, with nothing to read
        self._num_misses = 0  # since the folder was listed
        self._random = random.Random(worker)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Slice]:
        while (unit := self.take()) is not None:
            yield unit

    def take(self) -> Slice | None:
        """Return the next unit, waiting for others to end or to die; None when all is over.

        Raises JobError where the folder cannot be read or written.
        """
        try:
            place = self._take()
        except OSError as error:
            raise JobError(f"{CLAIMS} cannot be read or written: {error}") from error
        finally:
            self.is_waiting = False
        return None if place is None else self._map.units[place]

    def beat(self) -> None:
        """Renew all leases; to be called `BEATS` times in a lease's time."""
        self._num_beats += 1
        for lease in list(self._leases.values()):
            with contextlib.suppress(OSError, CaptionJobError):  # the next beat may succeed
                if not leases.renew(self._folder, lease, self._worker, self._num_beats):
                    with self._lock:
                        if self._leases.pop(lease.unit, None):
                            self.counters.lost += 1  # and go on: whoever is first wins
                elif lease.unit not in self._leases:  # it ended meanwhile
                    self._folder.remove(lease.name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Renew the leases in this block, on a thread, and give all back at its end."""
        with Ticker(self.beat, self.settings.lease_seconds / BEATS):
            try:
                yield
            finally:
                self.release_all()

    def finish(self, unit: Slice) -> None:
        """Give a unit back whose rows are all committed."""
        with _never_fatal():
            place = self._map.place_of(unit)
            siblings = self._map.siblings_of(unit.shard.id)
            is_final = self._has_file(place)
            if not is_final:
                self._map.noted.add(place)
                leases.note_done(self._folder, unit.id)
                is_final = self._has_file(place)  # a sibling was the last one, this very moment
            if is_final:
                self._map.end(siblings)
                for one in siblings if not unit.is_whole else ():
                    leases.forget_done(self._folder, self._map.units[one].id)
            self._give_back(unit, is_over=True)

    def fail(self, unit: Slice) -> None:
        """Give a unit back that cannot be read, and spare the job's other workers the attempt."""
        with _never_fatal():
            leases.note_failed(self._folder, unit.id, self._tag)
            self._map.end([self._map.place_of(unit)])
            self._give_back(unit, is_over=True)

    def release_all(self) -> None:
        """Give back what is not finished, at the end of a run, so that nobody waits for it."""
        for unit in [self._map.units[place] for place in self._map.mine]:
            with _never_fatal():
                self._give_back(unit, is_over=False)

    def _take(self) -> int | None:
        if self._old_failures is None:
            self._look()
        pause = FIRST_LOOK_SECONDS
        while True:
            place = self._find()
            if place is not None or not self._map.others():
                return place
            self.is_waiting = True
            began = self._clock.now()
            is_going_on = self._clock.sleep(pause * self._random.uniform(0.7, 1.3))
            self.counters.idle_seconds += self._clock.now() - began
            if not is_going_on:
                return None
            pause = min(1.5 * pause, self.settings.lease_seconds / BEATS)
            place = self._watch()
            if place is not None:
                return place

    def _find(self) -> int | None:
        """Take the next free unit; None if there is none, or if others are too quick."""
        num_fights = 0  # leases that another had
        while num_fights < MIN_MISSES:
            place = self._map.next_free(self._start)
            if place is None:
                return None
            if self._try(place):
                self._start = place + 1
                return place
            self.counters.misses += 1
            self._num_misses += 1
            num_fights += place in self._map.held
            if self._num_misses >= max(MIN_MISSES, len(self._map.units) // NAMES_A_MISS):
                self._look()
            self._start = self._map.anywhere(self._random)
        return None

    def _try(self, place: int, generation: int = 1) -> bool:
        """Try to get the lease on a unit."""
        unit = self._map.units[place]
        is_final = self._has_file(place)
        if is_final or self._tries[unit.id] >= MAX_TRIES:
            # A file ends its other slices too: who made it may have died before it said so.
            self._map.end(self._map.siblings_of(unit.shard.id) if is_final else [place])
            if place in self._map.given_back:  # taken, and finished, by one who did not know
                leases.forget_free(self._folder, unit.id)
            return False
        lease = Lease(unit.id, generation)
        if not leases.take(self._folder, lease, self._worker):
            self._map.held.add(place)
            return False
        with self._lock:
            self._leases[unit.id] = lease
        self._tries[unit.id] += 1
        self._map.mine.add(place)
        if place in self._map.given_back:
            leases.forget_free(self._folder, unit.id)
        if place in self._map.noted:
            self._map.noted.discard(place)
            leases.forget_done(self._folder, unit.id)
        for tag in (self._old_failures or {}).pop(unit.id, ()):
            leases.forget_failed(self._folder, unit.id, tag)
        self.counters.taken += 1
        return True

    def _give_back(self, unit: Slice, *, is_over: bool) -> None:
        self._map.mine.discard(self._map.place_of(unit))
        with self._lock:
            lease = self._leases.pop(unit.id, None)
        if lease is not None:
            leases.release(self._folder, lease, is_over=is_over)

    def _has_file(self, place: int) -> bool:
        return self._folder.stat(f"{self._map.units[place].shard.id}.parquet") is not None

    def _look(self) -> None:
        """List the finished files and the claims."""
        self.counters.listings += 1
        self._num_misses = 0
        for name in self._folder.names():
            self._map.end(self._map.siblings_of(name.removesuffix(".parquet")))
        self._read(ClaimNames.of(self._folder.names(CLAIMS)))

    def _read(self, found: ClaimNames) -> None:
        """Learn from the names in `_claims` what is held, committed, or of no use to try."""
        if self._old_failures is None:
            self._old_failures = {
                unit: tags for unit, tags in found.failed.items() if self._tag not in tags
            }
        new = (
            unit
            for unit, tags in found.failed.items()
            if tags - self._old_failures.get(unit, set())
        )
        self._map.end(self._map.places_of(new))
        before = (self._map.held | self._map.noted) - self._map.mine
        self._map.held = self._map.places_of(found.held) - self._map.mine
        self._map.noted = self._map.places_of(found.done)
        self._map.given_back = self._map.places_of(found.free)
        self._map.end(before - self._map.held - self._map.noted - self._map.given_back)
        self._map.tidy()

    def _watch(self) -> int | None:
        """Look at the others' leases, and take over the unit of one that fell silent."""
        states = {
            name.rpartition("/")[2]: state.version
            for name, state in self._folder.walk(CLAIMS, is_deep=False).items()
        }
        now = self._clock.now()
        found = ClaimNames.of(states)
        self._read(found)
        for place in self._map.others():
            unit = self._map.units[place].id
            generation = found.held.get(unit)
            if generation is None:
                continue
            version = states[f"{unit}.{generation:04d}"]
            is_silent = self._is_silent(unit, (generation, version), now)
            if is_silent and self._try(place, generation + 1):
                self.counters.taken_over += 1
                return place
        return None

    def _is_silent(self, unit: str, state: tuple[int, str], now: float) -> bool:
        """True once a lease has not changed for its time, on this worker's own clock."""
        sight = self._sights.get(unit)
        if sight is None or sight.state != state:
            self._sights[unit] = _Sight(state, now)
            return False
        return now - sight.since > self.settings.lease_seconds


@contextlib.contextmanager
def _never_fatal() -> Iterator[None]:
    """Let claims never end a run: what cannot be written makes others wait, or work twice."""
    with contextlib.suppress(OSError, CaptionJobError):
        yield
