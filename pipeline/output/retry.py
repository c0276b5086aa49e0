"""Some samples of finished shards made again, and put in their places by one rename.

    OUT/<shard id>.parquet           stays as it is, and can be read, until the rename
    OUT/_retry/<shard id>/*.parquet  pieces of the samples made again

A piece names the version of the file that it was made for; once that file is replaced, pieces
left over by a crash are for a version that is gone, and are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import RequestError
from pipeline.output.folder import OutFolder
from pipeline.output.merge import Part
from pipeline.output.resume import (
    Base,
    Leftover,
    ShardState,
    final_name,
    has_threads,
    pieces_of,
    read_rows,
    shard_state,
    version_of,
)
from pipeline.records import STATUSES, Shard

RETRY = "_retry"


def parse_retry(text: str) -> frozenset[str]:
    """Read `status=truncated,repetition`; RequestError for anything else."""
    name, equals, values = text.partition("=")
    statuses = frozenset(values.split(","))
    if name != "status" or not equals or not statuses <= set(STATUSES):
        raise RequestError(f"--retry is {text!r}; wanted status= and some of {','.join(STATUSES)}")
    return statuses


def retry_state(
    out: OutFolder, shard: Shard, fingerprint: str, statuses: frozenset[str]
) -> ShardState:
    """Find out how far a shard is, if samples of these statuses are to be made again.

    A shard that is not finished is simply gone on with.
    """
    state = shard_state(out, shard, fingerprint)
    if not state.is_done or not statuses:
        return state
    final = final_name(shard.id)
    version = version_of(out, final)
    rows = read_rows(out, final, ["index", "status"])
    is_wanted = pc.is_in(rows.column("status"), pa.array(sorted(statuses)))
    redo = frozenset(rows.filter(is_wanted).column("index").to_pylist())
    folder = f"{RETRY}/{shard.id}"
    committed, leftovers = pieces_of(out, folder, shard, fingerprint, version)
    leftovers += state.leftovers
    if not redo or not version:
        stale = [Leftover(one.name, one.reason, is_garbage=True) for one in leftovers]
        return ShardState(shard, True, state.num_rows, leftovers=tuple(stale))
    kept = frozenset(rows.column("index").to_pylist()) - redo
    return ShardState(
        shard=shard,
        num_rows=state.num_rows,
        committed=kept | committed.keys(),
        leftovers=tuple(leftovers),
        base=Base(final, folder, version, redo),
    )


def base_parts(out: OutFolder, base: Base) -> Iterator[Part]:
    """Yield the rows of the finished file that stay, a row group at a time."""
    redo = pa.array(sorted(base.redo), pa.int64())
    with out.open(base.final) as opened:
        file = pq.ParquetFile(opened)
        for group in range(file.num_row_groups):
            indices = file.read_row_group(group, ["index"], use_threads=False).column("index")
            if len(indices):
                first = int(pc.min(indices).as_py())
                yield Part(first, partial(_kept_rows, out, base.final, group, redo))


def _kept_rows(out: OutFolder, name: str, group: int, redo: pa.Array) -> pa.Table:
    with out.open(name) as file:
        table = pq.ParquetFile(file).read_row_group(group, use_threads=has_threads(file))
    return table.filter(pc.invert(pc.is_in(table.column("index"), redo)))
