"""A request that was found right, with what every later stage has to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from jobs.config import RunConfig
from jobs.metering import Meter
from jobs.sharing import num_cores
from pipeline.captioner import Captioner, ModelSource
from pipeline.input.checks import check_fields
from pipeline.input.dealing import Slice, deal
from pipeline.input.reader import ReaderSettings
from pipeline.input.shards import expand_shards, left_aside, with_columns
from pipeline.output.folder import OutFolder
from pipeline.output.job_record import JobRecord, check_folder, check_place
from pipeline.output.resume import (
    FolderState,
    Leftover,
    ShardState,
    divided_anew,
    look,
    shard_state,
    version_of,
)
from pipeline.output.retry import retry_state
from pipeline.output.waiting import Waiting
from pipeline.prompts import PromptTemplate, fields_needed
from pipeline.records import Shard
from pipeline.throughput import Snapshot
from pipeline.verdict import Tuning

MAX_LOOKED_AT = 5000  # finished files whose ends every worker reads, where all take from all


@dataclass(slots=True)
class Standby:
    """What a process keeps that does one run after another: a Ray actor."""

    shards: list[Shard] = field(default_factory=list)  # empty: the run's own words are expanded
    worker: str = ""  # whose throughput file goes on; empty: a new one
    source: ModelSource | None = None
    captioner: Captioner | None = None
    earlier: Snapshot = field(default_factory=Snapshot)  # of the runs before, all together
    meter: Meter | None = None  # of the run of now


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was found right, before weights are loaded."""

    config: RunConfig
    out: OutFolder
    slices: list[Slice]  # one of each shard that this worker has a part in
    source: ModelSource
    template: PromptTemplate
    record: JobRecord
    before: FolderState
    stale: tuple[Leftover, ...] = ()

    @classmethod
    def make(
        cls, config: RunConfig, standby: Standby | None = None, waiting: Waiting | None = None
    ) -> Plan:
        """Check shards, model, prompt and output folder; nothing is written.

        Raises RequestError where the request is wrong.
        """
        kept = standby or Standby()
        found = kept.shards or expand_shards(config.shards, allow_pipe=config.allow_pipe)
        found = with_columns(found, config.columns)
        place, is_claiming = config.worker.place, config.worker.is_claiming
        dealt = deal(found, place.rank, place.world_size)
        slices = [Slice(shard) for shard in found] if is_claiming else dealt
        shards = [one.shard for one in slices]
        out = config.folder(waiting)
        check_place(out)
        source = kept.source = kept.source or config.source()
        record = config.record(source)
        check_folder(out, record, overwrite=config.overwrite)
        if config.overwrite:
            before = FolderState(tuple(ShardState(shard) for shard in shards))
        else:
            rule = partial(retry_state, statuses=config.retry)
            is_large = is_claiming and len(shards) > MAX_LOOKED_AT
            # Then each worker looks at its share, or 1,000 would look at 1,000,000 each.
            trusted = {one.id for one in shards} - {one.shard.id for one in dealt}
            before = look(out, shards, record.fingerprint, rule, trusted if is_large else ())
        template = config.template(source)
        check_fields(found, config.columns, template.needs_fields | fields_needed(config.keep))
        stale = () if config.overwrite else divided_anew(out, found)
        return cls(config, out, slices, source, template, record, before, stale)

    def state_now(self) -> FolderState:
        """Look again, at the shards that were not done before."""
        if self.config.worker.is_claiming:
            ids = {state.shard.id for state in self.before.shards}
            shards = [state.shard for state in self.before.shards]
            return look(self.out, shards, self.record.fingerprint, trusted=ids)
        states = list(self.before.shards)
        for place, state in enumerate(states):
            base = state.base
            if base is not None and version_of(self.out, base.final) == base.version:
                continue  # its samples are still to be made again
            if not state.is_done:
                fingerprint = self.record.fingerprint
                states[place] = shard_state(self.out, state.shard, fingerprint)
        return FolderState(tuple(states))

    @property
    def notes(self) -> list[str]:
        """What of the folders in --shards was not taken."""
        return left_aside(self.config.shards)

    @property
    def reader_settings(self) -> ReaderSettings:
        """Which fields of a sample the prompt and the kept columns need."""
        return ReaderSettings(
            self.template.needs_fields | fields_needed(self.config.keep),
            has_lenient_end=self.config.has_lenient_end,
        )

    @property
    def tuning(self) -> Tuning:
        """What the verdict may ask to change."""
        config = self.config
        return Tuning(
            config.worker.loader_workers,
            config.speed.slots,
            config.speed.prefill_batch,
            config.commit.rows,
            # The default model sees in float32 whatever is asked for.
            "" if self.source.family == "default" else self.source.fingerprint.get("dtype", ""),
            num_cores() // config.worker.place.local_size,
        )
