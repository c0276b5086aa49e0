"""Who makes which share, and how far all are: the driver's book, without Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jobs.display import Standing
from jobs.launch.ray_actor import ShareDone
from jobs.result import RunResult
from pipeline.errors import JobError
from pipeline.output.folder import OutFolder
from pipeline.output.resume import FolderState, ShardState
from pipeline.records import Shard
from pipeline.throughput import Snapshot

SHARES_PER_ACTOR = 8  # so that a dead one costs little, and the last ones end together


def num_shares(num_shards: int, num_actors: int) -> int:
    """Return into how many shares the shards are dealt: few where a shard would be cut for it."""
    return max(num_actors, min(num_shards, SHARES_PER_ACTOR * num_actors))


@dataclass(slots=True)
class Board:
    """Shares that wait, are being made, and are done; a share lost with its actor waits again."""

    num_shares: int
    max_losses: int
    waiting: deque[int] = field(init=False)
    running: dict[int, int] = field(default_factory=dict)  # share -> actor
    done: dict[int, ShareDone] = field(default_factory=dict)
    standings: dict[int, Standing] = field(default_factory=dict)  # by share, of those running
    losses: Counter[int] = field(default_factory=Counter)
    lost_work: Snapshot = field(default_factory=Snapshot)  # of actors that died, as last heard

    def __post_init__(self) -> None:
        self.waiting = deque(range(self.num_shares))

    @property
    def is_over(self) -> bool:
        """True once nobody works, and nobody is to."""
        return not self.waiting and not self.running

    def give(self, actor: int) -> int:
        """Hand the next share to an actor."""
        share = self.waiting.popleft()
        self.running[share] = actor
        return share

    def settle(self, share: int, result: ShareDone) -> None:
        """Note what came of a share."""
        del self.running[share]
        self.standings.pop(share, None)
        self.done[share] = result

    def lose(self, share: int) -> int:
        """Take a share back from an actor that died, and return which one; it comes next.

        Raises JobError if that has happened to this share too often.
        """
        actor = self.running.pop(share)
        standing = self.standings.pop(share, None)
        if standing is not None:
            self.lost_work += standing.snapshot
        self.losses[share] += 1
        if self.losses[share] > self.max_losses:
            raise JobError(
                f"share {share} of {self.num_shares} ended its actor {self.losses[share]} times; "
                "what was finished is committed. --retries allows more"
            )
        self.waiting.appendleft(share)
        return actor

    def drop_waiting(self) -> None:
        """Hand out nothing more."""
        self.waiting.clear()

    def standing(self, seconds: float, num_actors: int) -> Standing:
        """Return how far the job is: shares are about equal, so that they tell of each other."""
        known = [done.before.num_rows + done.snapshot.images for done in self.done.values()]
        known += [one.num_total for one in self.standings.values() if one.num_total is not None]
        num_images = sum(done.before.num_rows + done.snapshot.images for done in self.done.values())
        num_images += sum(one.num_images for one in self.standings.values())
        total = round(sum(known) / len(known) * self.num_shares) if known else None
        return Standing(num_images, total, self.snapshot(seconds, num_actors))

    def snapshot(self, seconds: float, num_actors: int) -> Snapshot:
        """Return what all actors did, in the wall time of the job; stages are their mean."""
        both = self.lost_work
        for done in self.done.values():
            both += done.snapshot
        for one in self.standings.values():
            both += one.snapshot
        count = max(1, num_actors)
        return replace(
            both,
            seconds=seconds,
            waiting_seconds=both.waiting_seconds / count,
            vision_seconds=both.vision_seconds / count,
            prefill_seconds=both.prefill_seconds / count,
            decode_seconds=both.decode_seconds / count,
            writing_seconds=both.writing_seconds / count,
            starved_seconds=both.starved_seconds / count,
        )

    def result(
        self, out: OutFolder, shards: Sequence[Shard], stopped: str, snapshot: Snapshot
    ) -> RunResult | None:
        """Return how the whole job ended; None if no share was made."""
        if not self.done:
            return None
        before: dict[str, ShardState] = {}
        after: dict[str, ShardState] = {}
        errors: Counter[str] = Counter()
        failed: dict[str, str] = {}
        for done in self.done.values():
            for state in done.before.shards:
                before.setdefault(state.shard.id, state)
            for state in done.after.shards:
                if state.is_done or state.shard.id not in after:
                    after[state.shard.id] = state
            errors.update(done.errors)
            failed.update(done.failed)
        nothing = {shard.id: ShardState(shard) for shard in shards}
        first = next(iter(self.done.values()))
        return RunResult(
            out=out,
            before=FolderState(tuple((nothing | before).values())),
            after=FolderState(tuple((nothing | after).values())),
            snapshot=replace(snapshot, resumed_rows=sum(one.num_rows for one in before.values())),
            tuning=first.tuning,
            errors=errors,
            failed={name: why for name, why in failed.items() if not after[name].is_done},
            stopped=stopped or next((one.stopped for one in self.done.values() if one.stopped), ""),
            has_too_many_errors=any(one.has_too_many_errors for one in self.done.values()),
        )
