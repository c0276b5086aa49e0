"""Stop early without losing anything: signals, a time limit, or too many errors.

    asked to stop ──► nothing new is admitted ──► live sequences end ──► commit ──► exit 75
                      └────────── the grace, less what committing takes ─────────┘

When that time is over while sequences still run, `GraceOver` is raised inside the network's
turn, and only there, so that no commit is ever cut in two. A second Ctrl-C ends the process at
once, which is safe at any instruction.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
COMMIT_SECONDS = 5.0  # kept of the grace, for the last commit
SLEEP_SECONDS = 0.1  # after which a sleeper looks whether it should end
COMMIT_SHARE = 0.4  # of a grace so short that this is less
EXIT_SECONDS = 1.0  # kept of the grace after that, to be gone in time
EXIT_SHARE = 0.1


EXIT_AGAIN = 75


@contextlib.contextmanager
def nothing_done_yet(end: Callable[[int], int] = int) -> Iterator[None]:
    """Exit with 75 at a signal while modules are imported: a scheduler is to start it again.

    `end` is called with that code first, and returns the code to exit with.
    """

    def exit_again(number: int, frame: FrameType | None) -> None:
        os._exit(end(EXIT_AGAIN))

    before = {number: signal.signal(number, exit_again) for number in SIGNALS}
    try:
        yield
    except SystemExit:
        # The exit code is known: a scheduler's signal while the interpreter ends would hide it,
        # and make a failure of a job that is done.
        before |= {number: signal.SIG_IGN for number in SIGNALS if number != signal.SIGINT}
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopClock:
    """A clock whose sleep ends when the run is asked to."""

    def __init__(self, stop: Stop) -> None:
        """Sleep until `stop` is requested at the most."""
        self._stop = stop

    def now(self) -> float:
        """Return seconds that only grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> bool:
        """Wait; False, at once, if the run is to end."""
        end = time.monotonic() + seconds
        while not self._stop.is_requested and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLEEP_SECONDS))
        return not self._stop.is_requested


class GraceOver(BaseException):
    """The time that a stop may take is used up; no `except Exception` on the way may keep it."""


class Stop:
    """Whether, and why, this run should end early."""

    def __init__(self, grace_seconds: float = 20.0) -> None:
        """Give live sequences this long to end, less the time for the last commit."""
        self.reason = ""
        self._drain_seconds = max(
            grace_seconds - COMMIT_SECONDS, grace_seconds * (1 - COMMIT_SHARE)
        )
        self._end_seconds = grace_seconds - min(EXIT_SECONDS, grace_seconds * EXIT_SHARE)
        self._end: float | None = None  # by the monotonic clock, once a stop was asked for
        self._can_interrupt = False
        self._is_over = False

    @property
    def is_requested(self) -> bool:
        """True once the run should admit nothing more."""
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Ask the run to end; the first reason stands."""
        self.reason = self.reason or reason

    def seconds_left(self) -> float | None:
        """Return the time that commits may still take after a signal; None before one."""
        return None if self._end is None else self._end - time.monotonic()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow `GraceOver` to be raised in this block."""
        self._can_interrupt = True
        try:
            if self._is_over:
                raise GraceOver
            yield
        finally:
            self._can_interrupt = False

    def waiting_for(self, items: Iterator[T]) -> Iterator[T]:
        """Yield items; the waits between them are interruptible, what is done with them is not."""
        while True:
            with self.interruptible():
                item = next(items, None)
            if item is None:
                return
            yield item

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """Forbid `GraceOver` in this block, which stands inside an interruptible one."""
        before, self._can_interrupt = self._can_interrupt, False
        try:
            yield
        finally:
            self._can_interrupt = before
        if before and self._is_over:
            raise GraceOver

    @contextlib.contextmanager
    def listening(self, seconds: float | None = None) -> Iterator[None]:
        """Listen to signals, and stop `seconds` from now; on the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        if not self.is_requested:
            self._begin_grace()
        self.request(f"signal {signal.Signals(number).name}")

    def _begin_grace(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._drain_seconds)
        self._end = time.monotonic() + self._end_seconds

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            self._begin_grace()
            self.request("the time limit")
            return
        self._is_over = True
        if self._can_interrupt:
            raise GraceOver
