"""A thread that does small things at set times, while the main thread is in the network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Ticker:
    """Calls `tick` every `seconds`; what it raises waits for `check` on the main thread."""

    def __init__(
        self,
        tick: Callable[[], None],
        seconds: float,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Prepare the thread; it starts with the context. `on_error` is told of the first error.

        The main thread may be waiting, and would not come to `check` without being told.
        """
        self._on_error = on_error
        self._tick = tick
        self._seconds = seconds
        self._end = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def check(self) -> None:
        """Raise what the thread could not do."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._tick()
            except Exception as error:  # the disk, mostly; the main thread explains it
                self._error = error
                self._on_error(error)
                return
