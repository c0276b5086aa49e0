"""What a store can answer but bytes, in kinds that decide what is done next."""

from __future__ import annotations

from typing import Literal

Kind = Literal["transient", "missing", "denied", "changed", "exists", "refused"]


class RemoteError(Exception):
    """One request that failed.

    transient   a connection that was cut, stalled or refused, 5xx, 429: the same may work later
    missing     404: there is no such object or bucket
    denied      401, 403, no or bad credentials
    changed     the object is not the version any more that was asked for
    exists      a conditional write found the object there already
    refused     all else that another try will not mend
    """

    def __init__(self, kind: Kind, what: str, *, wait_seconds: float | None = None) -> None:
        """Say `what` was found, free of secrets; `wait_seconds` is what the server asked for."""
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.wait_seconds = wait_seconds


def fault_of_status(status: int, what: str, *, wait_seconds: float | None = None) -> RemoteError:
    """Return the fault that an HTTP status is, `what` being words for it."""
    kind: Kind = "refused"
    if status in (401, 403):
        kind = "denied"
    elif status in (404, 410):
        kind = "missing"
    elif status in (408, 423, 425, 429) or status >= 500:
        kind = "transient"
    return RemoteError(kind, what, wait_seconds=wait_seconds)
