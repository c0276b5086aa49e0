"""Captions that people corrected, beside the model's, and who changed what.

    OUT/_corrections/<time>-<hash>.parquet    one import: a line for each row that was looked at

A shard's own file never changes once it is there, so corrections lie beside it. Imports are
only ever added; of several corrections of one row the latest counts, and the others stay.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.errors import RequestError
from pipeline.output.commit import write_parquet
from pipeline.output.folder import OutFolder
from pipeline.output.resume import read_rows
from pipeline.records import Row

CORRECTIONS = "_corrections"
RowKey = tuple[str, int, int]  # shard, index, caption index

_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.string(), False),
        pa.field("index", pa.int64(), False),
        pa.field("caption_index", pa.int32(), False),
        pa.field("key", pa.string(), False),
        pa.field("sha256", pa.string(), True),
        pa.field("caption", pa.string(), True),
        pa.field("corrected_caption", pa.string(), False),
        pa.field("corrected_by", pa.string(), True),
        pa.field("corrected_at", pa.string(), True),
        pa.field("source", pa.string(), False),
    ]
)


@dataclass(frozen=True, slots=True)
class Correction:
    """What a person made of a row's caption; equal to the model's if they agreed with it."""

    shard: str
    index: int
    caption_index: int
    key: str
    sha256: str
    caption: str | None  # the model's
    corrected_caption: str
    corrected_by: str
    corrected_at: str  # ISO 8601, as the tool has it; it sorts
    source: str  # the tool, and its own number for the change

    @property
    def row_key(self) -> RowKey:
        """Which row this is of."""
        return self.shard, self.index, self.caption_index

    @property
    def is_change(self) -> bool:
        """False where the person agreed with the model."""
        return self.corrected_caption != self.caption


def key_of(row: Row) -> RowKey:
    """Return what names a row among all rows of a job."""
    return row.ref.shard, row.ref.index, row.caption_index


def store_corrections(out: OutFolder, corrections: Sequence[Correction]) -> str | None:
    """Write one import and say where; None if exactly these corrections are stored already."""
    known = {_identity(one) for one in all_corrections(out)}
    new = [one for one in corrections if _identity(one) not in known]
    if not new:
        return None
    table = pa.Table.from_pylist(
        [{name: getattr(one, name) for name in _SCHEMA.names} for one in new], schema=_SCHEMA
    )
    digest = hashlib.sha256("\0".join(map(repr, new)).encode("utf-8", "backslashreplace"))
    stamp = time.strftime("%Y%m%dT%H%M%S")
    name = f"{CORRECTIONS}/{stamp}-{digest.hexdigest()[:8]}.parquet"
    with out.draft(name) as draft:
        write_parquet(draft, _SCHEMA, [table], "corrections-half-written")
        out.put_new(draft, name)
    return out.place(name)


def all_corrections(out: OutFolder) -> list[Correction]:
    """Return every correction that was ever imported, in the order of the imports."""
    found = []
    for name in out.names(CORRECTIONS):
        if not name[:1].isdigit() or not name.endswith(".parquet"):
            continue
        try:
            table = read_rows(out, f"{CORRECTIONS}/{name}", _SCHEMA.names)
        except (OSError, pa.ArrowException, KeyError) as error:
            raise RequestError(
                f"{out.place(CORRECTIONS)}/{name} cannot be read as corrections: {error}"
            ) from None
        found += [Correction(**values) for values in table.to_pylist()]
    return found


def latest_corrections(out: OutFolder) -> dict[RowKey, Correction]:
    """Return the correction that counts for each row that has one."""
    latest: dict[RowKey, Correction] = {}
    for one in all_corrections(out):
        before = latest.get(one.row_key)
        if before is None or one.corrected_at >= before.corrected_at:
            latest[one.row_key] = one
    return latest


def _identity(one: Correction) -> tuple[object, ...]:
    return (*one.row_key, one.corrected_caption, one.corrected_by, one.corrected_at, one.source)
