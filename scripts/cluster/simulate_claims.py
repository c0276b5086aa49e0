"""A thousand workers and twenty thousand shards, claimed by the real code in virtual time.

Workers differ in speed, some die, some are preempted and come back as others, some sleep longer
than a lease lives, and their clocks are wrong and run at different rates. Printed is what that
costs: requests, work done twice, waiting at the end, and what a restart of everything takes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, field

from jobs.claiming import BEATS, Claims, ClaimSettings
from jobs.unit_map import UnitIndex
from pipeline.input.dealing import Slice
from pipeline.output.leases import ClaimNames
from pipeline.records import Shard
from scripts.cluster.simulated import (
    Killed,
    Latencies,
    SimulatedFolder,
    SimulatedStore,
    Timeline,
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is simulated."""

    workers: int = 1000
    shards: int = 20_000
    done: int = 0  # of these, finished by an earlier run: all workers start anew
    images: int = 10_000  # of a shard, on average
    spread: float = 0.2  # of shards' work, log-normal: two of three are within 20 %
    images_per_second: float = 100.0  # of a worker, on average
    die: float = 0.05  # share of the workers that die without a word
    preempt: float = 0.1  # that are stopped, and started again a minute later
    sleep: float = 0.02  # that stand still for three lease times
    lease_seconds: float = 60.0
    commit_seconds: float = 30.0
    seed: int = 0

    @property
    def shard_seconds(self) -> float:
        """Work of a shard for an average worker."""
        return self.images / self.images_per_second

    @property
    def fair_seconds(self) -> float:
        """What the job would take if nothing went wrong and nothing cost anything."""
        return (self.shards - self.done) * self.shard_seconds / self.workers


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    seconds: float = 0.0  # until the last worker ended
    work_seconds: float = 0.0  # of an average worker, done once
    twice_seconds: float = 0.0  # work that another worker did too
    redone_seconds: float = 0.0  # not committed when its worker died
    idle_seconds: float = 0.0  # of workers that waited for others
    done: int = 0
    made_twice: int = 0  # finished files that a second worker had made too
    starts: int = 0
    taken_over: int = 0
    lost: int = 0
    misses: int = 0
    listings: int = 0
    claims_left: int = 0  # leases of nobody, at the end
    requests: dict[str, int] = field(default_factory=dict)
    peak: int = 0  # requests in the busiest second


@dataclass(slots=True)
class WorkerClock:
    """A worker's own clock: set wrong, and too fast or too slow."""

    timeline: Timeline
    offset: float
    rate: float

    def now(self) -> float:
        """Return this worker's idea of the time."""
        return self.offset + self.timeline.now * self.rate

    def sleep(self, seconds: float) -> bool:
        """Wait by this clock."""
        self.timeline.wait(seconds / self.rate)
        return True


class Simulation:
    """One run of one scene."""

    def __init__(self, scene: Scene) -> None:
        """Set the scene."""
        self.scene = scene
        self.outcome = Outcome()
        self.timeline = Timeline()
        self.store = SimulatedStore(self.timeline, Latencies())
        chance = random.Random(scene.seed)
        self._units = [Slice(Shard(f"s-{i:07d}", f"/s-{i:07d}.tar")) for i in range(scene.shards)]
        self._index = UnitIndex(self._units)
        self._seconds = [
            chance.lognormvariate(-(scene.spread**2) / 2, scene.spread) for _ in range(scene.shards)
        ]
        self._committed = [0.0] * scene.shards  # of each shard's work
        self.store.finals.update(f"{unit.id}.parquet" for unit in self._units[: scene.done])
        self._chance = chance

    def run(self) -> Outcome:
        """Run to the end, and count."""
        for rank in range(self.scene.workers):
            self._start(rank, self._chance.uniform(0, 30), may_fail=True)
        self.timeline.run()
        outcome = self.outcome
        outcome.done = len(self.store.finals)
        outcome.claims_left = len(ClaimNames.of(self.store.claims).held)
        outcome.requests = dict(self.store.requests.most_common())
        outcome.peak = max(self.store.each_second.values(), default=0)
        return outcome

    def _start(self, rank: int, at: float, *, may_fail: bool) -> None:
        self.outcome.starts += 1
        number = self.outcome.starts
        self.timeline.start(at, lambda: self._work(rank, number, may_fail=may_fail))

    def _work(self, rank: int, number: int, *, may_fail: bool) -> None:
        """What a worker does: the real claims, around made-up work."""
        scene, chance = self.scene, random.Random(self.scene.seed * 1_000_003 + number)
        fate = chance.random() if may_fail else 1.0
        moment = chance.uniform(0, scene.fair_seconds)  # of its fate
        kinds = ((scene.die, "die"), (scene.preempt, "preempt"), (scene.sleep, "sleep"))
        kind = ""
        for share, name in kinds:
            kind = kind or name * (0 <= fate < share)
            fate -= share
        folder = SimulatedFolder(self.store)
        clock = WorkerClock(self.timeline, chance.uniform(-3600, 3600), chance.uniform(0.99, 1.01))
        claims = Claims(
            folder,
            self._index,
            f"worker-{number}",
            clock,
            job="simulated",
            start=rank * scene.shards // scene.workers,
            settings=ClaimSettings(scene.lease_seconds),
        )
        speed = chance.uniform(0.8, 1.2)
        try:
            for unit in claims:
                kind = self._caption(claims, folder, unit, speed, kind, moment)
                if kind == "stopped":
                    claims.release_all()
                    self._start(rank, self.timeline.now + 60, may_fail=False)
                    return
        finally:
            self._count(claims)

    def _caption(
        self,
        claims: Claims,
        folder: SimulatedFolder,
        unit: Slice,
        speed: float,
        kind: str,
        moment: float,
    ) -> str:
        """Do a unit's work from what is committed of it; return what is still to befall."""
        scene, place = self.scene, int(unit.id[2:])
        whole = self._seconds[place] * scene.shard_seconds
        done = self._committed[place]
        beat, commit = scene.lease_seconds / BEATS, scene.commit_seconds
        mine = 0.0
        while done < whole:
            step = min(beat, commit, (whole - done) / speed)
            self.timeline.wait(step)
            done += step * speed
            mine += step * speed
            if kind and self.timeline.now >= moment:
                if kind == "die":
                    self.outcome.redone_seconds += max(0.0, done - self._committed[place])
                    raise Killed
                if kind == "preempt":
                    self._commit(place, done, mine)
                    return "stopped"
                self.timeline.wait(3 * scene.lease_seconds)
                kind = ""
            folder.is_aside = True
            claims.beat()
            folder.is_aside = False
            mine = self._commit(place, done, mine)
        if not folder.create_if_absent(f"{unit.shard.id}.parquet", b""):
            self.outcome.made_twice += 1
        claims.finish(unit)
        return kind

    def _commit(self, place: int, done: float, mine: float) -> float:
        """Count what was newly done, and what another worker has done meanwhile."""
        new = max(0.0, min(mine, done - self._committed[place]))
        self.outcome.work_seconds += new
        self.outcome.twice_seconds += mine - new
        self._committed[place] = max(done, self._committed[place])
        return 0.0

    def _count(self, claims: Claims) -> None:
        counters, outcome = claims.counters, self.outcome
        outcome.seconds = max(outcome.seconds, self.timeline.now)
        outcome.taken_over += counters.taken_over
        outcome.lost += counters.lost
        outcome.misses += counters.misses
        outcome.listings += counters.listings
        outcome.idle_seconds += counters.idle_seconds


def lines_of(scene: Scene, outcome: Outcome) -> list[str]:
    """Say in lines what was found."""
    total = sum(outcome.requests.values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in outcome.requests.items())
    work = max(1e-9, outcome.work_seconds)
    return [
        f"{scene.workers:,} workers, {scene.shards:,} shards ({scene.done:,} done) of "
        f"{scene.images:,} images, "
        f"{scene.images_per_second:g} images/s each",
        f"ended after {outcome.seconds:,.0f} s, {outcome.seconds / scene.fair_seconds:.3f} times "
        f"the fair {scene.fair_seconds:,.0f} s; {outcome.done:,} files",
        f"{outcome.starts:,} starts; {outcome.taken_over:,} leases taken over, "
        f"{outcome.lost:,} of these from workers that only slept",
        f"work done twice {outcome.twice_seconds / work:.4%}, redone after deaths "
        f"{outcome.redone_seconds / work:.4%}, files made twice {outcome.made_twice:,}",
        f"workers waited {outcome.idle_seconds / outcome.starts:,.1f} s each at the end",
        f"requests {total:,} ({kinds})",
        f"requests a second {total / max(1.0, outcome.seconds):.1f}, {outcome.peak:,} in the "
        f"busiest; a shard {total / max(1, scene.shards):.1f}",
        f"tries for nothing {outcome.misses / max(1, scene.shards):.3f} a shard, listings "
        f"{outcome.listings / outcome.starts:.2f} a worker, claims left {outcome.claims_left:,}",
    ]


def main() -> None:
    """Read the command line, run, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    plain = Scene()
    for name, value in asdict(plain).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value)
    scene = Scene(**vars(parser.parse_args()))
    began = time.perf_counter()
    outcome = Simulation(scene).run()
    print("\n".join(lines_of(scene, outcome)))
    print(f"simulated in {time.perf_counter() - began:.0f} s")
    print(json.dumps({"scene": asdict(scene), "outcome": asdict(outcome)}))


if __name__ == "__main__":
    main()
