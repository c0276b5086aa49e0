"""The end of each Parquet file of a job: which job made it, from which bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.parquet as pq

from pipeline.input.identity import ShardIdentity
from pipeline.output.folder import OutFolder

META_JOB = b"captionjob.fingerprint"
META_SHARD = b"captionjob.shard"
META_VERSION = b"captionjob.retry_of"
INDEX_COLUMN = 1  # of the schema, which is fixed


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a file of this job tells."""

    identity: ShardIdentity
    num_rows: int
    first_index: int
    version: str  # of the finished file that a retry's piece belongs to


def read_footer(out: OutFolder, name: str, fingerprint: str) -> Footer | str | None:
    """Return a file's footer, the reason why it is none of this job's, or None if it is gone."""
    try:
        with out.open(name) as file:
            parquet = pq.read_metadata(file)
        metadata = parquet.metadata or {}
        identity = ShardIdentity.from_json(metadata[META_SHARD].decode())
        found = metadata[META_JOB].decode()
        first_index = 0
        if parquet.num_row_groups:
            first_index = int(parquet.row_group(0).column(INDEX_COLUMN).statistics.min)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no Parquet file of captionjob ({type(error).__name__})"
    if found != fingerprint:
        return "made with other settings"
    version = metadata.get(META_VERSION, b"").decode("utf-8", "replace")
    return Footer(identity, int(parquet.num_rows), first_index, version)
