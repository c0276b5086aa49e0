"""A minute on the user's machine and data: loader alone, network alone, the whole, trials."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs.bench.knobs import Knobs, Limits
from jobs.bench.search import Search, Tried
from jobs.bench.trial import Trials
from jobs.config import RunConfig
from jobs.plan import Plan
from jobs.stopping import GraceOver, Stop
from pipeline.errors import JobError, RequestError
from pipeline.throughput import Snapshot
from pipeline.verdict import Tuning, verdict

LOADER_SHARE, NETWORK_SHARE, WHOLE_SHARE = 0.1, 0.2, 0.25  # of the time; trials get the rest
MIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured; parts that a stop came before are None."""

    asked: Knobs
    chosen: Knobs
    tuning: Tuning
    loader_alone: float = 0.0  # images a second
    network_alone: float = 0.0
    whole: Snapshot | None = None
    tried: list[Tried] = field(default_factory=list)
    untried: list[Knobs] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def verdict(self) -> str:
        """What bounds the job with the settings asked for."""
        whole = self.whole or Snapshot()
        if whole.images or whole.seconds < 1:
            return verdict(whole, self.tuning)
        # A slow network ends no caption so soon, and still shows where its time goes.
        found = verdict(replace(whole, images=1), self.tuning)
        return f"{found}; no caption ended in {whole.seconds:.0f} s, so give it more --seconds"


def bench(config: RunConfig, seconds: float, stop: Stop, say: Callable[[str], None]) -> Bench:
    """Measure; nothing is written but to a temporary folder.

    Raises RequestError where the request is wrong, and JobError where no image can be had.
    """
    if seconds < MIN_SECONDS:
        raise RequestError(f"--seconds is {seconds:g}; wanted {MIN_SECONDS:g} or more")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="captionjob-bench-") as scratch:
        plan = Plan.make(replace(config, out=str(Path(scratch) / "check")))
        if not plan.slices:
            raise RequestError("--shards leave nothing to this worker, one of many")
        say(f"loading {plan.source.family} ({plan.source.backend})")
        try:
            with stop.interruptible():
                captioner = plan.source.load(config.sampling, config.speed)
        except GraceOver:
            knobs = Knobs.of(config, config.speed.threads)
            return Bench(knobs, knobs, plan.tuning, is_stopped=True)
        # What loading takes is not the job's; some of it is left to the trials all the same.
        deadline = max(began + seconds, time.monotonic() + seconds / 2)
        trials = Trials(plan, captioner, Path(scratch), stop)
        return _measure(trials, config, deadline, say)


def _measure(
    trials: Trials, config: RunConfig, deadline: float, say: Callable[[str], None]
) -> Bench:
    from pipeline.backends.threads import num_threads

    asked = Knobs.of(config, num_threads())
    config = asked.apply(config)
    seconds = deadline - time.monotonic()
    found = Bench(asked, asked, trials.plan.tuning)
    say("the loader alone")
    alone = trials.loader(config, LOADER_SHARE * seconds, 2 * config.speed.slots)
    found = replace(found, loader_alone=alone.images_per_second)
    if not alone.requests and not trials.stop.is_requested:
        raise JobError("no image of --shards could be made ready; `captionjob inspect` says more")
    if not trials.stop.is_requested:
        say("the network alone")
        network = trials.network(config, alone.requests, NETWORK_SHARE * seconds)
        found = replace(found, network_alone=network.images_per_second)
    if not trials.stop.is_requested:
        say("the whole job")
        found = replace(found, whole=trials.whole(config, WHOLE_SHARE * seconds))
    if found.whole is not None and not trials.stop.is_requested:
        found = _search(trials, config, found, deadline, say)
    return replace(found, is_stopped=trials.stop.is_requested)


def _search(
    trials: Trials,
    config: RunConfig,
    found: Bench,
    deadline: float,
    say: Callable[[str], None],
) -> Bench:
    from pipeline.backends.threads import set_threads

    assert found.whole is not None, "there is nothing to compare with"

    def measure(knobs: Knobs, seconds: float) -> Snapshot:
        if trials.stop.is_requested:
            return Snapshot()
        say(f"trying {found.asked.changes(knobs) or 'the settings asked for'}")
        set_threads(knobs.threads)
        return trials.whole(knobs.apply(config), seconds)

    search = Search(
        measure,
        Limits(config.sampling.num_captions, found.tuning.cores, _is_on_cpu(config)),
        deadline,
        Tried(found.asked, found.whole.images_per_second),
        found.whole,
    )
    chosen = search.run()
    if trials.stop.is_requested:
        chosen = found.asked
    set_threads(chosen.threads)
    return replace(found, chosen=chosen, tried=search.tried, untried=search.untried)


def _is_on_cpu(config: RunConfig) -> bool:
    from pipeline.backends.placement import choose_device

    return choose_device(config.speed.device).type == "cpu"
