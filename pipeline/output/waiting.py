"""How long an output's store is waited for when it is down, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A server's restart or failover takes seconds to a few minutes; to be started again, load the
# weights and queue for a machine costs a job about as much.
STORE_RETRY_SECONDS = 300.0


def _nothing_presses() -> float | None:
    return None


def _nobody_listens(line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Waiting:
    """For `seconds` of an outage; less where `seconds_left` says that the process has to end."""

    seconds: float = STORE_RETRY_SECONDS
    seconds_left: Callable[[], float | None] = _nothing_presses
    say: Callable[[str], None] = _nobody_listens


LOOKING = Waiting(20.0)  # of somebody who looks at an output, and can look again
