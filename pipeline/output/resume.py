"""What an output folder holds already: shards that are done, pieces of those that are not.

    OUT/_job.json                       what shapes captions (pipeline.output.job_record)
    OUT/<shard id>.parquet              a shard that is done
    OUT/_progress/<shard id>/
        00000-<run>.parquet             a piece: finished samples, complete
        _failed.json                    why the shard could not be read to its end
    OUT/_failed.json                    all of these together
    OUT/_aside/                         what could not be trusted; never read again

A file counts only if its footer can be read, and names this job and the bytes that the shard
still has. Nothing is written while looking; `tidy` does that, once the job has the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ShardError
from pipeline.input.identity import ShardIdentity, identify, stamp_of
from pipeline.input.pictures import stale_parts
from pipeline.output.folder import OutFolder
from pipeline.output.footer import META_JOB as META_JOB  # for those who read an output folder
from pipeline.output.footer import META_SHARD as META_SHARD
from pipeline.output.footer import Footer, read_footer
from pipeline.output.merge import Part
from pipeline.records import Shard

PROGRESS = "_progress"
ASIDE = "_aside"
FAILED_FILE = "_failed.json"
CHANGED = "its shard has changed since"
_THREADS = 16  # footers are read over a network more often than not


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that does not count, and why."""

    name: str
    reason: str
    is_garbage: bool = False  # nothing that was ever committed: removed, not set aside


@dataclass(frozen=True, slots=True)
class Base:
    """A shard's finished file, of which some samples are made again."""

    final: str
    folder: str  # where the retry's pieces lie
    version: str
    redo: frozenset[int]  # indices


@dataclass(frozen=True, slots=True)
class ShardState:
    """How far one shard is: done with so many rows, or so many samples committed in pieces."""

    shard: Shard
    is_done: bool = False
    num_rows: int = 0
    committed: frozenset[int] = frozenset()  # indices of the samples in pieces
    leftovers: tuple[Leftover, ...] = ()
    base: Base | None = None  # where samples of a finished file are made again


@dataclass(frozen=True, slots=True)
class FolderState:
    """How far each shard of a run is, in the run's order."""

    shards: tuple[ShardState, ...] = field(default=())

    @property
    def num_done(self) -> int:
        """Shards whose file is there."""
        return sum(state.is_done for state in self.shards)

    @property
    def num_partly_done(self) -> int:
        """Shards of which some samples are committed."""
        return sum(bool(state.committed) and not state.is_done for state in self.shards)

    @property
    def num_to_do(self) -> int:
        """Shards of which nothing is there."""
        return len(self.shards) - self.num_done - self.num_partly_done

    @property
    def num_redo(self) -> int:
        """Samples of finished files that are made again."""
        return sum(len(state.base.redo) for state in self.shards if state.base)

    @property
    def num_rows(self) -> int:
        """Rows that need not be made again."""
        return sum(state.num_rows for state in self.shards)


def look(
    out: OutFolder,
    shards: Sequence[Shard],
    fingerprint: str,
    state_of: Callable[[OutFolder, Shard, str], ShardState] | None = None,
    trusted: Container[str] = (),
) -> FolderState:
    """Find out how far each shard is, by `shard_state` or another rule; nothing is written.

    Of shards whose id is in `trusted`, a file of the right name is believed without a look.
    """
    rule = state_of or shard_state
    finals = set(out.names())
    started = set(out.names(PROGRESS))

    def one(shard: Shard) -> ShardState:
        if final_name(shard.id) not in finals and shard.id not in started:
            return ShardState(shard)
        if shard.id in trusted and final_name(shard.id) in finals:
            return ShardState(shard, is_done=True)
        return rule(out, shard, fingerprint)

    with ThreadPoolExecutor(_THREADS) as pool:
        return FolderState(tuple(pool.map(one, shards)))


def shard_state(out: OutFolder, shard: Shard, fingerprint: str) -> ShardState:
    """Find out how far one shard is."""
    final = final_name(shard.id)
    leftovers: list[Leftover] = []
    footer = read_footer(out, final, fingerprint)
    if isinstance(footer, Footer):
        reason = _change_since(footer.identity, shard)
        if not reason:
            return ShardState(shard, True, footer.num_rows, leftovers=_done_with(out, shard))
        leftovers.append(Leftover(final, reason))
    elif footer is not None:
        leftovers.append(Leftover(final, footer))
    committed, unfit = pieces_of(out, progress_folder(shard.id), shard, fingerprint)
    return ShardState(
        shard, False, sum(committed.values()), frozenset(committed), (*leftovers, *unfit)
    )


def pieces_of(
    out: OutFolder, folder: str, shard: Shard, fingerprint: str, version: str = ""
) -> tuple[dict[int, int], list[Leftover]]:
    """Return the samples that a folder's pieces hold, with their rows, and what does not count.

    With a `version`, the pieces are those of a retry of that version of the shard's file.
    """
    committed: dict[int, int] = {}  # index -> rows
    dead = [Leftover(name, "never finished", is_garbage=True) for name in out.garbage(folder)]
    leftovers = list(dead)
    names = pieces_in(out, folder)
    now = _identity_now(shard) if names else None
    for name in names:
        footer = read_footer(out, name, fingerprint)
        if isinstance(footer, Footer) and now is not None and now != footer.identity:
            footer = CHANGED
        if isinstance(footer, str):
            leftovers.append(Leftover(name, footer))
        elif footer is not None and footer.version != version:
            leftovers.append(Leftover(name, "its shard's file was replaced", is_garbage=True))
        elif footer is not None:
            with contextlib.suppress(FileNotFoundError):  # a twin finished the shard this moment
                rows = read_rows(out, name, ["index"])
                committed |= Counter(rows.column("index").to_pylist())
    return committed, leftovers


def tidy(out: OutFolder, leftovers: Sequence[Leftover]) -> None:
    """Remove garbage, and set aside what cannot be trusted."""
    for leftover in leftovers:
        folder, _, name = leftover.name.rpartition("/")
        if leftover.is_garbage:
            out.remove(leftover.name)
            out.prune(folder)  # if that was the last
        else:
            origin = folder.rpartition("/")[2] or out.title
            out.move(leftover.name, f"{ASIDE}/{origin}-{name}-{os.urandom(4).hex()}")


def divided_anew(out: OutFolder, shards: Sequence[Shard]) -> tuple[Leftover, ...]:
    """Return the files of parts that a folder of pictures is no longer divided into.

    Their pictures are in other parts now: rows of both would be rows twice.
    """
    if all(shard.folder is None for shard in shards):
        return ()
    names = stale_parts(out.names(), shards)
    for part in stale_parts(out.names(PROGRESS), shards):
        names += pieces_in(out, progress_folder(part))
    return tuple(Leftover(name, "its folder is divided anew") for name in names)


def final_name(shard_id: str) -> str:
    """Return where the whole shard's rows lie."""
    return f"{shard_id}.parquet"


def progress_folder(shard_id: str) -> str:
    """Return where an unfinished shard's pieces lie."""
    return f"{PROGRESS}/{shard_id}"


def piece_names(out: OutFolder, shard_id: str) -> list[str]:
    """Return an unfinished shard's pieces, of all workers and runs, by name."""
    return pieces_in(out, progress_folder(shard_id))


def pieces_in(out: OutFolder, folder: str) -> list[str]:
    """Return the pieces that lie in a folder, by their whole name."""
    return [f"{folder}/{name}" for name in out.names(folder) if name.endswith(".parquet")]


def part_of(
    out: OutFolder, name: str, identity: ShardIdentity, fingerprint: str, version: str = ""
) -> Part | None:
    """Return a piece for merging; None if it is of another job or of other bytes."""
    footer = read_footer(out, name, fingerprint)
    if not isinstance(footer, Footer) or footer.identity != identity:
        return None
    if footer.version != version:
        return None
    return Part(footer.first_index, lambda: read_rows(out, name))


def version_of(out: OutFolder, final: str) -> str:
    """Return what tells a shard's file from its replacement, or ``""`` if there is none."""
    found = out.stat(final)
    return "" if found is None else found.version


def read_rows(out: OutFolder, name: str, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file of ours, without what Arrow guesses from folder names."""
    with out.open(name) as file:
        return pq.ParquetFile(file).read(columns, use_threads=has_threads(file))


def has_threads(file: object) -> bool:
    """True for an opened file that Arrow's threads may read."""
    return isinstance(file, pa.NativeFile)


def _identity_now(shard: Shard) -> ShardIdentity | None:
    """Return None for a shard that cannot be read now, which is told when its turn comes."""
    try:
        return identify(shard)
    except ShardError:
        return None


def _change_since(found: ShardIdentity, shard: Shard) -> str:
    """Say whether a whole file's shard has changed; a copy with another time has not.

    Pieces are still to be joined with more rows, so for them only the very same file will do.
    """
    try:
        if (shard.stamp or stamp_of(shard)) == (found.size, found.mtime_ns):
            return ""
    except ShardError:
        return ""
    now = _identity_now(shard)
    return "" if now is None or now.has_same_bytes(found) else CHANGED


def _done_with(out: OutFolder, shard: Shard) -> tuple[Leftover, ...]:
    """Return what still lies in the progress folder of a shard that is done."""
    folder = progress_folder(shard.id)
    dead = [*(f"{folder}/{name}" for name in out.names(folder)), *out.garbage(folder)]
    return tuple(Leftover(name, "its shard is done", is_garbage=True) for name in sorted(dead))
