"""What one Ray actor does: keep a network, and make one share of the shards after another.

Nothing here knows Ray, so that it runs, and is tested, without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from jobs.config import RunConfig, WorkerSettings
from jobs.display import Standing
from jobs.plan import Standby
from jobs.ranks import Place
from jobs.run import Run, worker_name
from jobs.stopping import Stop
from pipeline.output.resume import FolderState
from pipeline.records import Shard
from pipeline.throughput import Snapshot
from pipeline.verdict import Tuning

SOURCE = "Ray"


@dataclass(frozen=True, slots=True)
class ShareDone:
    """What came of a share: its shards before and after, and what this actor did for it."""

    before: FolderState
    after: FolderState
    snapshot: Snapshot
    tuning: Tuning
    errors: Counter[str]
    failed: dict[str, str]
    stopped: str
    has_too_many_errors: bool


class ShareMaker:
    """One actor; its methods may be called on several threads at once, `make` on one."""

    def __init__(self, config: RunConfig, number: int, num_shares: int) -> None:
        """Remember what the job is; the network is loaded with the first share."""
        self._config = config
        self._num_shares = num_shares
        self._standby = Standby(
            worker=worker_name(WorkerSettings(Place(number, number + 1, SOURCE)))
        )
        self._stop = Stop(config.limits.grace_seconds)

    def ping(self) -> bool:
        """Answer, which a dead actor does not."""
        return True

    def make(self, share: int, shards: list[Shard]) -> ShareDone:
        """Caption what is not captioned yet of a share of the shards.

        Raises RequestError and JobError as a run does; what was committed stands.
        """
        place = Place(share, self._num_shares, SOURCE)
        config = replace(self._config, worker=replace(self._config.worker, place=place))
        self._standby.shards = shards
        earlier = self._standby.earlier
        self._standby.meter = None
        result = Run(config, self._stop, standby=self._standby).run()
        is_begun = self._standby.meter is not None
        return ShareDone(
            before=result.before,
            after=result.after,
            snapshot=result.snapshot - earlier if is_begun else result.snapshot,
            tuning=result.tuning,
            errors=result.errors,
            failed=result.failed,
            stopped=result.stopped if result.num_open else "",
            has_too_many_errors=result.has_too_many_errors,
        )

    def standing(self) -> Standing | None:
        """Return how far the share of now is; None if there is none."""
        meter = self._standby.meter
        if meter is None:
            return None
        standing = meter.standing()
        return replace(standing, snapshot=standing.snapshot - meter.earlier)

    def stop(self, reason: str) -> None:
        """Commit what is finished, and end the share of now early."""
        self._stop.request(reason)
