"""Places where a kill test ends the process, so that no instruction between two commits is lucky.

`CAPTIONJOB_KILL_AT=piece-written:3` makes the process kill itself, by SIGKILL, when it passes
the point `piece-written` for the third time. The variable is read once; without it a point
costs one comparison. `POINTS` names them all, in the order in which a shard passes them.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "CAPTIONJOB_KILL_AT"
POINTS = (
    "job-written",  # _job.json lies under its temporary name
    "lease-written",  # of a worker that claims
    "piece-half-written",  # rows are in the file, the footer is not
    "piece-written",  # complete, under its temporary name
    "piece-committed",  # under its own name
    "final-half-written",
    "final-written",
    "final-committed",  # the shard is done, its pieces still lie there
    "piece-removed",  # after each of them
    "failed-written",
)
STORE_POINTS = (*POINTS, "part-put")  # the last: of a large file, after each part that went up

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_passes_left = int(_count or 1)


def reach(point: str) -> None:
    """End the process here, if the environment asks for it."""
    global _passes_left
    if point != _name:
        return
    _passes_left -= 1
    if _passes_left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
