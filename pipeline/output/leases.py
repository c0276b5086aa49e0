"""Who works on what, for workers that take shards one by one: small files in `OUT/_claims/`.

    a-1f.0001            the lease on shard a-1f: its holder rewrites it again and again
    a-1f.0002            the next one, made by who found the first one silent: this one counts
    a-1f.free            its holder was stopped before the end
    a-1f.failed-9c0d     could not be read to its end, says a worker of the job 9c0d
    b-2e+00000-08000.done    a slice whose rows are committed, of a shard that is not finished

A holder that finishes removes its lease once the shard's file is there, so that a unit that was
held, and is neither held nor free any more, is finished: nobody has to look for its file.

All that is asked of the folder is that of many who create a name only one succeeds. Clocks
are never compared: an observer sees whether a lease is rewritten while its own clock runs.

A lease keeps work from being done twice; that rows are neither lost nor doubled does not
depend on it. A holder that only slept goes on beside its successor, and whoever commits first
wins, as ever (`pipeline.output.store`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

CLAIMS = "_claims"
_FAILED = "failed-"
_DONE = "done"
_FREE = "free"


class FileState(Protocol):
    """What a listing tells of a file."""

    @property
    def version(self) -> str:
        """Another one after each replacement."""
        ...


class LeaseFolder(Protocol):
    """What leases need of an output folder."""

    def names(self, folder: str = "") -> list[str]:
        """Return what lies directly in a folder."""
        ...

    def walk(self, folder: str = "", *, is_deep: bool = True) -> Mapping[str, FileState]:
        """Return the files of a folder, by their whole name."""
        ...

    def stat(self, name: str) -> FileState | None:
        """Look at one file."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole small file."""
        ...

    def create_if_absent(self, name: str, data: bytes, point: str = "") -> bool:
        """Put a small file if there is none of that name; of many who try, one gets True."""
        ...

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Put a small file in place of an older one, or of none."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """One's own lease on a unit of work."""

    unit: str
    generation: int

    @property
    def name(self) -> str:
        """Its file."""
        return f"{CLAIMS}/{self.unit}.{self.generation:04d}"

    @property
    def successor(self) -> Lease:
        """The one that ends it."""
        return Lease(self.unit, self.generation + 1)


@dataclass(slots=True)
class ClaimNames:
    """What the names in `_claims` say."""

    held: dict[str, int] = field(default_factory=dict)  # unit -> the generation that counts
    failed: dict[str, set[str]] = field(default_factory=dict)  # unit -> tags of jobs
    done: set[str] = field(default_factory=set)  # slices
    free: set[str] = field(default_factory=set)  # given back before their end

    @classmethod
    def of(cls, names: Iterable[str]) -> ClaimNames:
        """Read the names; what is none of ours is left out."""
        found = cls()
        for name in names:
            unit, _, kind = name.rpartition("/")[2].rpartition(".")
            if kind.isdigit() and unit:
                found.held[unit] = max(int(kind), found.held.get(unit, 0))
            elif kind.startswith(_FAILED):
                found.failed.setdefault(unit, set()).add(kind.removeprefix(_FAILED))
            elif kind == _DONE:
                found.done.add(unit)
            elif kind == _FREE:
                found.free.add(unit)
        return found


def take(folder: LeaseFolder, lease: Lease, worker: str) -> bool:
    """Try to get a lease; True for one of all who try."""
    return folder.create_if_absent(lease.name, _text(worker, 0), "lease-written")


def renew(folder: LeaseFolder, lease: Lease, worker: str, beat: int) -> bool:
    """Show that the holder lives; False if another worker has the unit now."""
    if folder.stat(lease.successor.name) is not None:
        return False
    folder.replace(lease.name, _text(worker, beat))
    return True


def release(folder: LeaseFolder, lease: Lease, *, is_over: bool) -> None:
    """Give a lease back, and remove the silent ones that it came after."""
    if not is_over:
        folder.create_if_absent(f"{CLAIMS}/{lease.unit}.{_FREE}", b"")
    for generation in range(lease.generation, 0, -1):
        folder.remove(Lease(lease.unit, generation).name)


def forget_free(folder: LeaseFolder, unit: str) -> None:
    """Remove the note that a unit was given back."""
    folder.remove(f"{CLAIMS}/{unit}.{_FREE}")


def note_done(folder: LeaseFolder, unit: str) -> None:
    """Note that a slice is committed, while its shard is not finished."""
    folder.create_if_absent(f"{CLAIMS}/{unit}.{_DONE}", b"")


def forget_done(folder: LeaseFolder, unit: str) -> None:
    """Remove that note."""
    folder.remove(f"{CLAIMS}/{unit}.{_DONE}")


def note_failed(folder: LeaseFolder, unit: str, tag: str) -> None:
    """Note for the workers of the same job that a unit cannot be read."""
    folder.create_if_absent(f"{CLAIMS}/{unit}.{_FAILED}{tag}", b"")


def forget_failed(folder: LeaseFolder, unit: str, tag: str) -> None:
    """Remove that note, for a job that tries again."""
    folder.remove(f"{CLAIMS}/{unit}.{_FAILED}{tag}")


def of_worker(folder: LeaseFolder, worker: str) -> list[Lease]:
    """Return the leases that name a worker, which is known to be dead."""
    found = []
    for unit, generation in ClaimNames.of(folder.names(CLAIMS)).held.items():
        lease = Lease(unit, generation)
        with contextlib.suppress(FileNotFoundError):  # given back this moment
            if worker and holder_of(folder.read(lease.name)) == worker:
                found.append(lease)
    return found


def tag_of(job: str) -> str:
    """Return a short name of a job that is safe in a file name."""
    return hashlib.sha256(job.encode()).hexdigest()[:8]


def holder_of(data: bytes) -> str:
    """Return the worker that a lease names, or ``""``."""
    try:
        return str(json.loads(data)["worker"])
    except (ValueError, KeyError, TypeError):
        return ""


def _text(worker: str, beat: int) -> bytes:
    return json.dumps({"worker": worker, "beat": beat}).encode() + b"\n"
