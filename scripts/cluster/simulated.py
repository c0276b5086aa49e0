"""Many workers in virtual time, against one store: what a cluster costs, without the cluster.

Each worker is a thread that runs the real code; only one of them runs at a time. Whenever it
waits, for a request or for work to be done, the clock jumps to whoever is next. So requests of
a thousand workers interleave as they would, and a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.output.leases import CLAIMS

STACK_BYTES = 1 << 18


class Killed(BaseException):
    """A worker that dies here and now; nothing on its way may keep it."""


class Timeline:
    """Virtual seconds, and who is next."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.now = 0.0
        self._queue: list[tuple[float, int, threading.Lock]] = []
        self._num = 0
        self._threads: list[threading.Thread] = []
        self._over = threading.Lock()
        self.errors: list[BaseException] = []

    def start(self, at: float, work: Callable[[], None]) -> None:
        """Let a worker begin at a moment; from outside, or from another worker."""
        turn = threading.Lock()
        turn.acquire()
        self._push(at, turn)

        def run() -> None:
            turn.acquire()
            try:
                work()
            except Killed:
                pass
            except BaseException as error:
                self.errors.append(error)
            self._next()

        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def run(self) -> None:
        """Run all workers to their ends; raises what one of them raised."""
        self._over.acquire()
        self._next()
        self._over.acquire()
        if self.errors:
            raise self.errors[0]

    def wait(self, seconds: float) -> None:
        """Let the calling worker wait, and others run meanwhile."""
        turn = threading.Lock()
        turn.acquire()
        self._push(self.now + seconds, turn)
        self._next()
        turn.acquire()

    def _push(self, at: float, turn: threading.Lock) -> None:
        heapq.heappush(self._queue, (at, self._num, turn))
        self._num += 1

    def _next(self) -> None:
        if not self._queue:
            self._over.release()
            return
        self.now, _, turn = heapq.heappop(self._queue)
        turn.release()


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that a request takes; those of an object store in the same region."""

    get: float = 0.015
    put: float = 0.03
    listing: float = 0.1  # a thousand names


@dataclass(slots=True)
class SimulatedStore:
    """The files of an output folder, and how often anybody asked for them."""

    timeline: Timeline
    latencies: Latencies = field(default_factory=Latencies)
    finals: set[str] = field(default_factory=set)
    claims: dict[str, int] = field(default_factory=dict)  # name -> version
    requests: Counter[str] = field(default_factory=Counter)
    each_second: Counter[int] = field(default_factory=Counter)
    _version: int = 0

    def asked(self, kind: str, seconds: float, times: int, *, is_aside: bool) -> None:
        """Count a request, and let its worker wait for the answer unless it does so aside."""
        self.requests[kind] += times
        self.each_second[int(self.timeline.now)] += times
        if not is_aside:
            self.timeline.wait(seconds * times)

    def new_version(self) -> int:
        """Return a number that no file had before."""
        self._version += 1
        return self._version


@dataclass(frozen=True, slots=True)
class State:
    """What a listing tells of a file."""

    version: str


@dataclass(slots=True)
class SimulatedFolder:
    """One worker's door to the store; what it asks for happens when the answer is sent."""

    store: SimulatedStore
    is_aside: bool = False  # while another thread of the worker asks, which holds up nobody

    def names(self, folder: str = "") -> list[str]:
        """List finished files or claims."""
        found = list(self.store.finals if not folder else self.store.claims)
        self._ask("list", self.store.latencies.listing, 1 + len(found) // 1000)
        return [name.removeprefix(f"{folder}/") for name in found]

    def walk(self, folder: str = "", *, is_deep: bool = True) -> dict[str, State]:
        """List claims with their versions."""
        self._ask("list", self.store.latencies.listing, 1 + len(self.store.claims) // 1000)
        return {name: State(str(version)) for name, version in self.store.claims.items()}

    def stat(self, name: str) -> State | None:
        """Look at one file."""
        self._ask("stat", self.store.latencies.get)
        if name in self.store.finals:
            return State("1")
        version = self.store.claims.get(name)
        return None if version is None else State(str(version))

    def read(self, name: str) -> bytes:
        """No worker reads what stands in a claim."""
        raise FileNotFoundError(name)

    def create_if_absent(self, name: str, data: bytes, point: str = "") -> bool:
        """Create a claim, or a finished file."""
        self._ask("create", self.store.latencies.put)
        if not name.startswith(CLAIMS):
            is_first = name not in self.store.finals
            self.store.finals.add(name)
            return is_first
        if name in self.store.claims:
            return False
        self.store.claims[name] = self.store.new_version()
        return True

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Renew a claim."""
        self._ask("replace", self.store.latencies.put)
        self.store.claims[name] = self.store.new_version()

    def remove(self, name: str) -> None:
        """Remove a claim."""
        self._ask("remove", self.store.latencies.put)
        self.store.claims.pop(name, None)

    def _ask(self, kind: str, seconds: float, times: int = 1) -> None:
        self.store.asked(kind, seconds, times, is_aside=self.is_aside)
