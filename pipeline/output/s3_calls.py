"""Requests to an S3 store, made again while it is down: for a bounded time, and never past a stop.

Each request runs on a thread of its own, which is left behind if it hangs when the time is over.
That is safe, since a put happens whole or not at all, whoever still waits for it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.errors import JobError, RequestError, StoreDownError
from pipeline.output.waiting import Waiting
from pipeline.remote.faults import RemoteError
from pipeline.remote.patience import Patience
from pipeline.remote.s3 import S3, connect

FIRST_CONTACT_SECONDS = 60.0  # a wrong address, more often than not
POLL_SECONDS = 0.2
TELL_SECONDS = 3.0  # of an outage; a shorter one is nobody's business
# Damage on the way, which the store tells by its checksums.
_DAMAGED = ("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "InvalidDigest")

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Box:
    """What came of a request on its thread."""

    answer: Any = None
    error: Exception | None = None


class Calls:
    """Makes requests for one output folder; safe on any thread, which share one outage."""

    def __init__(self, url: str, bucket: str, waiting: Waiting) -> None:
        """Open the client; RequestError where there is none to be had."""
        self.url = url
        self.bucket = bucket
        self._waiting = waiting
        self._s3: S3 = connect(attempts=1)
        self._patience = Patience.from_environment()
        self._worked: set[str] = set()  # kinds of request that were answered before
        self._down_since: float | None = None
        self._has_told = False
        self._lock = threading.Lock()

    @property
    def client(self) -> Any:
        """The boto3 client, for use in what `make` is given."""
        return self._s3.client

    def make(
        self,
        kind: str,
        request: Callable[[], Answer],
        *,
        name: str = "",
        is_once: bool = False,
        is_check: bool = False,
    ) -> Answer:
        """Return a request's answer; what is transient is tried again.

        Raises FileNotFoundError for an object that is not there, RemoteError where a condition
        did not hold or a range is empty, StoreDownError once the store was waited for long
        enough, and JobError for the rest, which is a RequestError in a check or at the first
        contact.
        """
        began = time.monotonic()
        failures = 0
        while True:
            fault = self._try(request, into := _Box())
            if fault is None:
                self._note_up(kind)
                return into.answer  # type: ignore[no-any-return]
            self._raise_if_final(fault, kind, name, is_check)
            failures += 1
            since = self._note_down(fault, began)
            self._give_up_if_due(since, fault, is_once)
            self._pause(self._patience.wait_after(failures, fault.wait_seconds), since, fault)

    def _try(self, request: Callable[[], Answer], box: _Box) -> RemoteError | None:
        """Make a request once, on a thread of its own; fill the box or return the fault."""
        done = threading.Event()

        def run() -> None:
            try:
                box.answer = request()
            except Exception as error:  # boto3 raises many kinds; `fault_of` knows them
                box.error = error
            done.set()

        threading.Thread(target=run, name="s3", daemon=True).start()
        while not done.wait(POLL_SECONDS):
            left = self._waiting.seconds_left()
            if left is not None and left <= 0:
                raise self._down("no answer")
        if box.error is None:
            return None
        if isinstance(box.error, RemoteError):
            return box.error
        return self._s3.fault_of(box.error)

    def _raise_if_final(self, fault: RemoteError, kind: str, name: str, is_check: bool) -> None:
        """Raise what another try will not mend."""
        if fault.kind == "transient" or any(code in fault.what for code in _DAMAGED):
            return
        if fault.kind in ("exists", "changed") or "InvalidRange" in fault.what:
            raise fault
        is_bucket = "NoSuchBucket" in fault.what
        if fault.kind == "missing" and not is_bucket:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name or self.url)
        if is_bucket or fault.kind == "denied":
            if kind in self._worked:
                return  # it worked before: a store that restarts answers like this for a while
            what = f"there is no bucket {self.bucket!r}"
            if not is_bucket:
                what = f"{_WORDS[kind]} bucket {self.bucket!r} was denied ({fault.what})"
        else:
            what = f"{_WORDS[kind]} it was refused ({fault.what})"
        error = RequestError if is_check or not self._worked else JobError
        raise error(f"{self.url}: {what}")

    def _give_up_if_due(self, since: float, fault: RemoteError, is_once: bool) -> None:
        limit = self._waiting.seconds
        if not self._worked:
            limit = min(limit, FIRST_CONTACT_SECONDS)
        left = self._waiting.seconds_left()
        if is_once or time.monotonic() - since >= limit or (left is not None and left <= 0):
            raise self._down(fault.what)

    def _pause(self, seconds: float, since: float, fault: RemoteError) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, seconds))
            self._give_up_if_due(since, fault, is_once=False)

    def _note_up(self, kind: str) -> None:
        with self._lock:
            self._worked.add(kind)
            since, self._down_since = self._down_since, None
            has_told, self._has_told = self._has_told, False
        if since is not None and has_told:
            self._waiting.say(f"{self.url} answers again after {time.monotonic() - since:.0f} s")

    def _note_down(self, fault: RemoteError, began: float) -> float:
        """Note a failure; return since when this request, or the whole store, has failed."""
        with self._lock:
            self._down_since = since = began if self._down_since is None else self._down_since
            is_told = self._has_told
            self._has_told = is_told or time.monotonic() - since >= TELL_SECONDS
            is_news = self._has_told and not is_told
        if is_news:
            self._waiting.say(
                f"{self.url} does not answer ({fault.what}); trying again for up to "
                f"{self._waiting.seconds:.0f} s"
            )
        return min(since, began)

    def _down(self, what: str) -> StoreDownError:
        return StoreDownError(
            f"{self.url} does not answer ({what}); all that was committed stays, and a rerun goes "
            "on from there"
        )


_WORDS = {
    "list": "listing",
    "read": "reading",
    "put": "writing to",
    "remove": "removing from",
    "uploads": "listing uploads of",
}
