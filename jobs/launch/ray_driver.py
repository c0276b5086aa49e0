"""The driver of a job on Ray: actors that hold the network, shares of the shards as their tasks.

    Board ── next share ──► idle actor ── ShareDone ──► Board
      ▲                         │
      └──── the share ◄── RayActorError ──► away: pinged, idle again once it answers

Retries are the driver's own (max_task_retries=0): Ray would use its own up in the seconds in
which a node is dead and not yet known to be, and an idle list that a dead actor returns to loses
shares that never began. A share may so be made twice; commits are such that it does not matter.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jobs.commands import run_alarms
from jobs.config import RunConfig
from jobs.display import Display, display_on
from jobs.launch.ray_actor import ShareMaker
from jobs.launch.ray_board import Board, num_shares
from jobs.result import RunResult, summary
from jobs.stopping import Stop
from jobs.terminal import plural
from pipeline.errors import CaptionJobError, JobError, RequestError
from pipeline.input.shards import expand_shards
from pipeline.output.job_record import check_place
from pipeline.records import Shard

POLL_SECONDS = 0.5
THREADS = 4  # of an actor: one makes a share, the others answer
PING_SECONDS = 1.0  # between two calls to an actor that does not answer
MAX_DEATHS = 20
MAX_REASON = 400
POLITE_SECONDS = 30.0  # beyond the grace, for actors that are to stop


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What is asked of Ray."""

    address: str | None = None  # None: as Ray finds it, by RAY_ADDRESS or on this machine
    actors: int | None = None  # None: as many as the cluster has room for
    cpus: float = 1.0
    gpus: float = 0.0
    retries: int = 10


def run_on_ray(config: RunConfig, settings: RaySettings) -> int:
    """Run the job on the cluster, print the summary, return the exit code."""
    try:
        import ray
    except ImportError:
        raise RequestError(
            "launch ray needs the ray package: pip install 'captionjob[ray]'"
        ) from None
    shards = expand_shards(config.shards, allow_pipe=config.allow_pipe)
    check_place(config.folder())
    _connect(ray, settings.address)
    display = display_on(sys.stderr)
    stop = Stop(config.limits.grace_seconds)
    limit = config.limits.seconds
    driver = Driver(ray, config, settings, shards, display, stop)
    try:
        with stop.listening(None if limit is None else limit - config.limits.grace_seconds):
            result = driver.run()
    finally:
        display.close()
        ray.shutdown()
    if result is None:
        raise JobError("stopped before any share was made")
    print("\n".join([*summary(result), *run_alarms(result)]), flush=True)
    return result.exit_code


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"--address {address}" if address else "no --address, and no RAY_ADDRESS"
        raise RequestError(f"no Ray cluster is reached ({where}): {error}") from None


@dataclass(slots=True)
class Driver:
    """Hands out shares, takes them back from the dead, shows how far all are."""

    ray: Any
    config: RunConfig
    settings: RaySettings
    shards: list[Shard]
    display: Display
    stop: Stop
    _actors: list[Any] = field(default_factory=list)
    _idle: list[int] = field(default_factory=list)
    _board: Board = field(init=False)
    _makes: dict[Any, int] = field(default_factory=dict)  # a promise -> its share
    _pings: dict[Any, int] = field(default_factory=dict)  # a promise -> its actor
    _asked: dict[Any, int] = field(default_factory=dict)  # standings, by share
    _put: Any = None  # the shards, in Ray's store
    _away: dict[int, float] = field(default_factory=dict)  # since when an actor does not answer
    _deaths: Counter[int] = field(default_factory=Counter)  # answers in a row that say it is dead
    _dead: dict[int, str] = field(default_factory=dict)  # those of which no more is hoped, and why
    _told: float = 0.0  # when the actors were told to stop

    def run(self) -> RunResult | None:
        """Make all shares; the actors end with the job."""
        count = self._num_actors()
        self._board = Board(num_shares(len(self.shards), count), self.settings.retries)
        self._start_actors(count)
        shares = plural(self._board.num_shares, "share")
        self.display.say(
            f"{plural(len(self.shards), 'shard')} in {shares} on {plural(count, 'actor')}"
        )
        began = time.perf_counter()
        try:
            while not self._board.is_over and not self._is_too_late():
                self._tell_stop()
                self._call()
                self._hand_out()
                self._gather()
                self.display.show(self._board.standing(time.perf_counter() - began, count))
        finally:
            for actor in self._actors:
                self.ray.kill(actor)
        snapshot = self._board.snapshot(time.perf_counter() - began, count)
        return self._board.result(self.config.folder(), self.shards, self.stop.reason, snapshot)

    def _num_actors(self) -> int:
        if self.settings.actors is not None:
            return self.settings.actors
        found = self.ray.cluster_resources()
        room = [found.get("CPU", 0.0) / self.settings.cpus] if self.settings.cpus else []
        room += [found.get("GPU", 0.0) / self.settings.gpus] if self.settings.gpus else []
        count = int(min(room)) if room else 1
        if not count:
            raise RequestError(
                f"the cluster has {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs; "
                f"wanted {self.settings.cpus:g} and {self.settings.gpus:g} for an actor"
            )
        return count

    def _start_actors(self, count: int) -> None:
        remote = self.ray.remote(
            num_cpus=self.settings.cpus,
            num_gpus=self.settings.gpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=THREADS,
        )(ShareMaker)
        # Not given when an actor starts: one that starts again might find them gone.
        self._put = self.ray.put(self.shards)
        for number in range(count):
            actor = remote.remote(self.config, number, self._board.num_shares)
            self._actors.append(actor)
            self._pings[actor.ping.remote()] = number

    def _call(self) -> None:
        """Ask the actors that are away whether they are back; JobError if none ever will be."""
        now = time.monotonic()
        for number, since in list(self._away.items()):
            if now - since >= PING_SECONDS:
                del self._away[number]
                self._pings[self._actors[number].ping.remote()] = number
        if len(self._dead) == len(self._actors):
            reason = _last_words(next(iter(self._dead.values())))
            raise JobError(f"no actor lives, and Ray starts none again: {reason}")

    def _hand_out(self) -> None:
        while self._idle and self._board.waiting:
            number = self._idle.pop()
            share = self._board.give(number)
            self._makes[self._actors[number].make.remote(share, self._put)] = share
        busy = set(self._asked.values())
        for share, number in self._board.running.items():
            if share not in busy:
                self._asked[self._actors[number].standing.remote()] = share

    def _gather(self) -> None:
        """Wait a little, and take what has come."""
        awaited = [*self._makes, *self._pings]
        if not awaited:
            time.sleep(POLL_SECONDS)
            return
        self.ray.wait(awaited, num_returns=1, timeout=POLL_SECONDS)
        promises = [*awaited, *self._asked]
        ready, _ = self.ray.wait(promises, num_returns=len(promises), timeout=0)
        for promise in ready:
            if promise in self._makes:
                self._settle(promise, self._makes.pop(promise))
            elif promise in self._pings:
                self._welcome(promise, self._pings.pop(promise))
            else:
                self._note(promise, self._asked.pop(promise))

    def _settle(self, promise: Any, share: int) -> None:
        try:
            done = self.ray.get(promise)
        except self.ray.exceptions.RayActorError:
            number = self._board.lose(share)
            self.display.say(f"actor {number} is gone; its share waits for another")
            self._away[number] = time.monotonic()
            return
        except self.ray.exceptions.RayTaskError as error:
            raise _explained(error) from None
        self._idle.append(self._board.running[share])
        self._board.settle(share, done)
        if done.has_too_many_errors:
            self.stop.request("--max-error-rate")

    def _welcome(self, promise: Any, number: int) -> None:
        """Take an actor into the idle list once it has answered."""
        try:
            self.ray.get(promise)
        except self.ray.exceptions.ActorUnavailableError:
            self._away[number] = time.monotonic()
        except self.ray.exceptions.RayActorError as error:
            # Seldom the end of it: Ray says so too while it finds out that a node is dead.
            self._deaths[number] += 1
            if self._deaths[number] < MAX_DEATHS:
                self._away[number] = time.monotonic()
            else:
                self._dead[number] = str(error)
                self.display.say(f"actor {number} does not come back")
        else:
            self._deaths[number] = 0
            self._idle.append(number)

    def _note(self, promise: Any, share: int) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            standing = self.ray.get(promise)
            if standing is not None and share in self._board.running:
                self._board.standings[share] = standing

    def _tell_stop(self) -> None:
        if not self.stop.is_requested:
            return
        self._board.drop_waiting()
        if not self._told:
            self._told = time.monotonic()
            self.display.say(f"stopping ({self.stop.reason}): committing what is finished")
            for actor in self._actors:
                actor.stop.remote(self.stop.reason)

    def _is_too_late(self) -> bool:
        """True once actors that were told to stop have had the time for it."""
        patience = self.config.limits.grace_seconds + POLITE_SECONDS
        return bool(self._told) and time.monotonic() - self._told > patience


def _last_words(text: str) -> str:
    """Return the line of a trace that names the error, or its first one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return [*lines[:1], *named][-1][:MAX_REASON]


def _explained(error: Any) -> CaptionJobError:
    """Return what an actor raised, without the trace of the way here."""
    cause = error.cause
    if isinstance(cause, CaptionJobError):
        return cause
    return JobError(f"an actor failed: {type(cause).__name__}: {cause}")
