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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ShardError
from pipeline.input.identity import ShardIdentity, identify, stamp_of
from pipeline.output.commit import is_orphan, is_temporary
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

    path: Path
    reason: str
    is_garbage: bool = False  # nothing that was ever committed: removed, not set aside


@dataclass(frozen=True, slots=True)
class Base:
    """A shard's finished file, of which some samples are made again."""

    final: Path
    folder: Path  # where the retry's pieces lie
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
    out: Path,
    shards: Sequence[Shard],
    fingerprint: str,
    state_of: Callable[[Path, Shard, str], ShardState] | None = None,
) -> FolderState:
    """Find out how far each shard is, by `shard_state` or another rule; nothing is written."""
    rule = state_of or shard_state
    finals = _names(out)
    started = _names(out / PROGRESS)

    def one(shard: Shard) -> ShardState:
        if f"{shard.id}.parquet" not in finals and shard.id not in started:
            return ShardState(shard)
        return rule(out, shard, fingerprint)

    with ThreadPoolExecutor(_THREADS) as pool:
        return FolderState(tuple(pool.map(one, shards)))


def shard_state(out: Path, shard: Shard, fingerprint: str) -> ShardState:
    """Find out how far one shard is."""
    final = final_path(out, shard.id)
    leftovers: list[Leftover] = []
    footer = read_footer(final, fingerprint)
    if isinstance(footer, Footer):
        reason = _change_since(footer.identity, shard)
        if not reason:
            return ShardState(shard, True, footer.num_rows, leftovers=_done_with(out, shard))
        leftovers.append(Leftover(final, reason))
    elif footer is not None:
        leftovers.append(Leftover(final, footer))
    committed, unfit = pieces_of(progress_folder(out, shard.id), shard, fingerprint)
    return ShardState(
        shard, False, sum(committed.values()), frozenset(committed), (*leftovers, *unfit)
    )


def pieces_of(
    folder: Path, shard: Shard, fingerprint: str, version: str = ""
) -> tuple[dict[int, int], list[Leftover]]:
    """Return the samples that a folder's pieces hold, with their rows, and what does not count.

    With a `version`, the pieces are those of a retry of that version of the shard's file.
    """
    committed: dict[int, int] = {}  # index -> rows
    leftovers: list[Leftover] = []
    paths = _sorted_files(folder)
    now = _identity_now(shard) if paths else None
    for path in paths:
        if is_temporary(path.name) and is_orphan(path):
            leftovers.append(Leftover(path, "never finished", is_garbage=True))
        if is_temporary(path.name) or path.suffix != ".parquet":
            continue
        footer = read_footer(path, fingerprint)
        if isinstance(footer, Footer) and now is not None and now != footer.identity:
            footer = CHANGED
        if isinstance(footer, str):
            leftovers.append(Leftover(path, footer))
        elif footer is not None and footer.version != version:
            leftovers.append(Leftover(path, "its shard's file was replaced", is_garbage=True))
        elif footer is not None:
            with contextlib.suppress(FileNotFoundError):  # a twin finished the shard this moment
                committed |= Counter(read_rows(path, ["index"]).column("index").to_pylist())
    return committed, leftovers


def tidy(out: Path, leftovers: Sequence[Leftover]) -> None:
    """Remove garbage, and set aside what cannot be trusted."""
    for leftover in leftovers:
        if leftover.is_garbage:
            leftover.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                leftover.path.parent.rmdir()  # if that was the last
            continue
        aside = out / ASIDE
        aside.mkdir(exist_ok=True)
        name = f"{leftover.path.parent.name}-{leftover.path.name}-{os.urandom(4).hex()}"
        with contextlib.suppress(FileNotFoundError):  # a twin was first
            leftover.path.rename(aside / name)


def final_path(out: Path, shard_id: str) -> Path:
    """Return where the whole shard's rows lie."""
    return out / f"{shard_id}.parquet"


def progress_folder(out: Path, shard_id: str) -> Path:
    """Return where an unfinished shard's pieces lie."""
    return out / PROGRESS / shard_id


def piece_paths(out: Path, shard_id: str) -> list[Path]:
    """Return an unfinished shard's pieces, of all workers and runs, by name."""
    return pieces_in(progress_folder(out, shard_id))


def pieces_in(folder: Path) -> list[Path]:
    """Return the pieces that lie in a folder, by name."""
    names = sorted(name for name in _names(folder) if name.endswith(".parquet"))
    return [folder / name for name in names if not is_temporary(name)]


def part_of(
    path: Path, identity: ShardIdentity, fingerprint: str, version: str = ""
) -> Part | None:
    """Return a piece for merging; None if it is of another job or of other bytes."""
    footer = read_footer(path, fingerprint)
    if not isinstance(footer, Footer) or footer.identity != identity:
        return None
    return Part(footer.first_index, lambda: read_rows(path)) if footer.version == version else None


def version_of(final: Path) -> str:
    """Return what tells a shard's file from its replacement, or ``""`` if there is none."""
    try:
        status = final.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def read_rows(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file of ours, without what Arrow guesses from folder names."""
    return pq.ParquetFile(path).read(columns)


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
        if stamp_of(shard) == (found.size, found.mtime_ns):
            return ""
    except ShardError:
        return ""
    now = _identity_now(shard)
    return "" if now is None or now.has_same_bytes(found) else CHANGED


def _done_with(out: Path, shard: Shard) -> tuple[Leftover, ...]:
    """Return what still lies in the progress folder of a shard that is done."""
    files = _sorted_files(progress_folder(out, shard.id))
    dead = [path for path in files if not is_temporary(path.name) or is_orphan(path)]
    return tuple(Leftover(path, "its shard is done", is_garbage=True) for path in dead)


def _sorted_files(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names(folder))]


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()
