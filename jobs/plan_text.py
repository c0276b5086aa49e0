"""What `--dry-run` shows: the plan of a run that was found right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice

from jobs.plan import Plan
from jobs.result import plan_line
from jobs.terminal import bytes_text
from pipeline.captioner import Captioner
from pipeline.errors import SampleError, ShardError
from pipeline.images.opening import open_sample
from pipeline.input.reader import read_shard
from pipeline.records import Sample

MAX_SHARDS_SHOWN = 10
MAX_SAMPLES_SHOWN = 3
_REPEATED = re.compile(r"(<[^<>]+>)\1{3,}")  # image places, for the most part


def plan_text(plan: Plan) -> Iterator[str]:
    """Yield the plan line by line; reads the first samples and loads the weights."""
    yield str(plan.config.worker.place)
    yield from plan.notes
    yield plan_line(plan.before)
    yield from _shards(plan)
    yield ""
    yield "settings that shape captions"
    for name, value in plan.record.settings.items():
        yield f"  {name} = {json.dumps(value, ensure_ascii=False)}"
    yield f"  fingerprint {plan.record.fingerprint}"
    yield ""
    captioner = plan.source.load(plan.config.sampling, plan.config.speed)
    speed = plan.config.speed
    yield (
        f"memory: cache {bytes_text(captioner.cache_bytes)} "
        f"for {speed.slots} slots; prefill batch {speed.prefill_batch}"
    )
    yield from _samples(plan, captioner)
    yield ""
    yield "nothing was written (--dry-run)"


def _shards(plan: Plan) -> Iterator[str]:
    shown = zip(plan.before.shards, plan.slices, strict=True)
    for state, mine in islice(shown, MAX_SHARDS_SHOWN):
        standing = "done" if state.is_done else "partly done" if state.committed else "to do"
        rows = f", {state.num_rows} rows kept" if state.num_rows else ""
        size = bytes_text(state.shard.size or 0)
        part = "" if mine.is_whole else f"{mine.share:.0%} of the images of "
        yield f"  {part}{state.shard.url} ({size}): {standing}{rows} -> {state.shard.id}.parquet"
    more = len(plan.before.shards) - MAX_SHARDS_SHOWN
    if more > 0:
        yield f"  and {more} more"


def _samples(plan: Plan, captioner: Captioner) -> Iterator[str]:
    """Show the first samples of the first shard, and the prompt as the network gets it."""
    if not plan.slices:
        return
    shard = plan.slices[0].shard
    yield f"first samples of {shard.url}"
    try:
        for sample in islice(read_shard(shard, plan.reader_settings), MAX_SAMPLES_SHOWN):
            yield from _sample(plan, captioner, sample)
    except ShardError as error:
        yield f"  the shard is damaged: {error.detail}"


def _sample(plan: Plan, captioner: Captioner, sample: Sample) -> Iterator[str]:
    name = f"  {sample.ref.index} {sample.ref.member}"
    try:
        image, facts = open_sample(sample, plan.config.images)
        prompt = captioner.preview(image, plan.template.render(sample))
    except SampleError as error:
        yield f"{name}: an error row, {error}"
        return
    yield f"{name}: {facts.width}x{facts.height} {facts.format}"
    folded = _REPEATED.sub(lambda run: f"{run[1]} x{len(run[0]) // len(run[1])} ", prompt.text)
    yield f"      prompt {folded!r}"
    runs = [(one, len(list(same))) for one, same in groupby(prompt.ids)]
    ids = " ".join(f"{one} x{times}" if times > 1 else f"{one}" for one, times in runs)
    yield f"      {len(prompt.ids)} ids {ids}"
