"""Work ahead on threads: in order, in bounded memory, stoppable at any moment.

    source ──► one thread at a time pulls ──► any thread works ──► take(), in order
               │ waits while there is no room │

Pillow, zlib and torch release the GIL, so threads are enough. "Bounded" counts what is being
worked on as well as what is ready: at most `max_items`, and no new item is pulled while what is
held weighs `max_bytes` or more, so that memory is exceeded by one item at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

CLOSE_SECONDS = 10.0


def _weightless(_: object) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """How far ahead the threads may work."""

    threads: int = 2
    max_items: int = 64
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("threads", "max_items", "max_bytes"):
            assert getattr(self, name) >= 1, f"{name} of 1 or more"


@dataclass(slots=True)
class _Failed:
    error: BaseException


class Prefetcher(Generic[T, R]):
    """Run `work` over the items of `source` on threads, and hand the results on in order.

    What the source or the work raises is raised by `take` in its turn, after all results before
    it, and ends the stream. Close it, or use it as a context, and no thread is left behind.
    """

    def __init__(
        self,
        source: Iterable[T],
        work: Callable[[T], R],
        limits: PrefetchLimits | None = None,
        *,
        weigh_item: Callable[[T], int] = _weightless,
        weigh_result: Callable[[R], int] | None = None,
    ) -> None:
        """Start the threads; the `weigh` functions give bytes, a result weighs like its item."""
        self._source: Iterator[T] = iter(source)
        self._work = work
        self._limits = limits or PrefetchLimits()
        self._weigh_item = weigh_item
        self._weigh_result = weigh_result
        self._changed = threading.Condition()
        self._results: dict[int, R | _Failed] = {}  # place -> what came out, not yet taken
        self._weights: dict[int, int] = {}  # place -> bytes, from the pull to the take
        self._num_pulled = 0
        self._num_taken = 0
        self._is_pulling = False
        self._has_ended = False
        self._is_closed = False
        self.waiting_seconds = 0.0  # that `take` was blocked
        self._threads = [
            threading.Thread(target=self._run, name=f"prefetch-{i}", daemon=True)
            for i in range(self._limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, max_items: int, *, block: bool, seconds: float | None = None) -> list[R]:
        """Return up to `max_items` results that are ready; with `block`, wait for at least one.

        An empty list after a blocking call means that no more will come, or, with `seconds`,
        that none came in this time.
        """
        with self._changed:
            if block:
                began = time.perf_counter()
                try:
                    self._changed.wait_for(lambda: self._is_ready or self._is_finished, seconds)
                finally:
                    self.waiting_seconds += time.perf_counter() - began
            taken: list[R] = []
            while len(taken) < max_items and self._is_ready:
                result = self._results[self._num_taken]
                if isinstance(result, _Failed) and taken:
                    break  # its turn comes with the next call
                del self._results[self._num_taken]
                self._weights.pop(self._num_taken, None)
                self._num_taken += 1
                if isinstance(result, _Failed):
                    self._stop()
                    raise result.error
                taken.append(result)
            self._changed.notify_all()
            return taken

    def __iter__(self) -> Iterator[R]:
        while taken := self.take(1, block=True):
            yield from taken

    @property
    def is_exhausted(self) -> bool:
        """True once no further result, and no error, will ever come."""
        with self._changed:
            return self._is_finished

    @property
    def num_ready(self) -> int:
        """How many results lie ready, whatever their order."""
        with self._changed:
            return len(self._results)

    def close(self) -> None:
        """Stop: nothing more is pulled, what is ready is dropped, the threads end, the source too.

        A thread that is stuck in the source or in the work is left after some seconds; it is a
        daemon and keeps no process alive.
        """
        with self._changed:
            self._stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        close = getattr(self._source, "close", None)
        if close is not None and not any(thread.is_alive() for thread in self._threads):
            close()

    def __enter__(self) -> Prefetcher[T, R]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self) -> None:
        self._is_closed = True
        self._results.clear()
        self._changed.notify_all()

    @property
    def _is_ready(self) -> bool:
        return self._num_taken in self._results

    @property
    def _is_finished(self) -> bool:
        is_drained = self._has_ended and not self._is_pulling and not self._has_more
        return self._is_closed or is_drained

    @property
    def _has_more(self) -> bool:
        """Whether a result, or an error, is still on its way to `take`."""
        return self._num_taken < self._num_pulled

    @property
    def _has_room(self) -> bool:
        held = self._num_pulled - self._num_taken
        return (
            held < self._limits.max_items and sum(self._weights.values()) < self._limits.max_bytes
        )

    def _run(self) -> None:
        """What each thread does: pull in turn, work at will."""
        while (place := self._begin_pull()) is not None:
            item = self._pull(place)
            if isinstance(item, _Failed):
                return
            result: R | _Failed
            weight: int | None
            try:
                result = self._work(item)
                weight = self._weigh_result(result) if self._weigh_result else None
            except BaseException as error:  # it belongs to whoever takes, not to this thread
                result, weight = _Failed(error), 0
            del item
            self._settle(place, result, weight)
            del result

    def _begin_pull(self) -> int | None:
        """Wait for the turn to pull; return the place of the next item, None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed or self._has_ended or (self._has_room and not self._is_pulling)
                )
            )
            if self._is_closed or self._has_ended:
                return None
            self._is_pulling = True
            return self._num_pulled

    def _pull(self, place: int) -> T | _Failed:
        """Take the next item from the source, outside the lock, for reading may take long."""
        weight = 0
        item: T | _Failed
        try:
            item = next(self._source)
            weight = self._weigh_item(item)
        except BaseException as error:  # StopIteration is the usual one; all others are told
            item = _Failed(error)
        with self._changed:
            self._is_pulling = False
            if isinstance(item, _Failed):
                self._has_ended = True
                if not isinstance(item.error, StopIteration):
                    self._num_pulled += 1
                    self._results[place] = item
            else:
                self._num_pulled += 1
                self._weights[place] = weight
            self._changed.notify_all()
        return item

    def _settle(self, place: int, result: R | _Failed, weight: int | None) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._results[place] = result
            if weight is not None:
                self._weights[place] = weight
            if isinstance(result, _Failed):
                self._has_ended = True  # what comes after an error is not worked on
            self._changed.notify_all()
