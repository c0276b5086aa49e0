"""An output folder on a file system that this machine sees."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from pipeline.errors import RequestError
from pipeline.fault_points import reach
from pipeline.output.commit import (
    is_orphan,
    is_temporary,
    publish,
    sync_folder,
    temporary_path,
    write_bytes,
)
from pipeline.output.folder import Draft, LogFile, Stat

FREE_BYTES = 16 << 20  # less is no room for one piece and its final file
GUARD_SECONDS = 60.0  # a replacement takes milliseconds: whoever guards it longer has died
_GUARD = ".guard-"


@dataclass(slots=True)
class LocalDraft:
    """A hidden file in the folder that it is for."""

    path: Path

    @contextlib.contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Open it once for writing; at the end it is on the disk."""
        with self.path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """Open what was written."""
        with self.path.open("rb") as file:
            yield file


class LocalLog:
    """Appends to a file; a line that the disk had no room for is taken back."""

    def __init__(self, path: Path) -> None:
        """Open the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # so that closing has nothing to write

    def append(self, data: bytes, *, is_last: bool) -> None:
        """Add whole lines, or raise OSError and leave the file as it was."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder on a file system; see `OutFolder` for what each method promises."""

    path: Path

    @property
    def url(self) -> str:
        """The path as it was given."""
        return str(self.path)

    @property
    def title(self) -> str:
        """The folder's own name."""
        return self.path.absolute().name

    def place(self, name: str) -> str:
        """Return the path of a file in it."""
        return str(self.path / name)

    @property
    def absence(self) -> str:
        """Say if the folder is not there, or is none."""
        if self.path.is_dir():
            return ""
        return "is not a folder" if self.path.exists() else "does not exist"

    def holds(self, path: Path) -> bool:
        """True for the folder and all below it."""
        out = self.path.absolute().resolve()
        return path == out or out in path.parents

    def names(self, folder: str = "") -> list[str]:
        """Return what lies directly in a folder, sorted, without temporary files."""
        try:
            found = os.listdir(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if not _is_hidden(name))

    def walk(self, folder: str = "", *, is_deep: bool = True) -> dict[str, Stat]:
        """Return the files of a folder by their whole name."""
        found: dict[str, Stat] = {}
        for name in self.names(folder):
            whole = f"{folder}/{name}" if folder else name
            if is_deep and (self.path / whole).is_dir():
                found |= self.walk(whole)
            else:
                stat = self.stat(whole)
                if stat is not None:
                    found[whole] = stat
        return found

    def stat(self, name: str) -> Stat | None:
        """Look at one file."""
        try:
            status = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _stat_of(status)

    def read(self, name: str) -> bytes:
        """Return a whole small file."""
        return (self.path / name).read_bytes()

    def read_version(self, name: str) -> tuple[bytes, str]:
        """Return a whole small file and its version, both of one open file."""
        with (self.path / name).open("rb") as file:
            return file.read(), _stat_of(os.fstat(file.fileno())).version

    def read_tail(self, name: str, num_bytes: int) -> bytes:
        """Return the end of a file."""
        with (self.path / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading by Arrow's own means, which its threads may use."""
        return cast(BinaryIO, pa.OSFile(str(self.path / name), "rb"))

    def garbage(self, folder: str) -> list[str]:
        """Return temporary files in a folder whose process has ended."""
        try:
            found = sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [f"{folder}/{name}" if folder else name for name in found if is_temporary(name)]
        return [name for name in names if is_orphan(self.path / name)]

    @contextlib.contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """Give a hidden path beside the name, and remove what lies there unless it was renamed."""
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        path = temporary_path(final.parent, final.name)
        try:
            yield LocalDraft(path)
        finally:
            path.unlink(missing_ok=True)

    def put_new(self, draft: Draft, name: str) -> bool:
        """Link a draft to its name; False if it is taken."""
        assert isinstance(draft, LocalDraft)
        return publish(draft.path, self.path / name)

    def put_over(self, draft: Draft, name: str, version: str | None = None) -> bool:
        """Rename a draft; of two in the moment after the look at the version, the last wins."""
        assert isinstance(draft, LocalDraft)
        final = self.path / name
        if version is not None:
            found = self.stat(name)
            if found is None or found.version != version:
                return False
        os.replace(draft.path, final)
        sync_folder(final.parent)
        return True

    def create_if_absent(self, name: str, data: bytes, point: str = "") -> bool:
        """Write a small file under a hidden name, and link it."""
        with self.draft(name) as draft:
            self._fill(draft, data, point)
            return self.put_new(draft, name)

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Write a small file under a hidden name, and rename it."""
        with self.draft(name) as draft:
            self._fill(draft, data, point)
            self.put_over(draft, name)

    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> bool:
        """Rename a small file into place under a guard that only one process can make.

        The guard is named after the version, so whoever comes later finds the guard, or, once
        it is gone, another version. One that its process left behind is broken after a while;
        should that process only have slept, two may believe that they replaced the file.
        """
        final = self.path / name
        digest = hashlib.sha256(f"{final.name} {version}".encode()).hexdigest()[:24]
        guard = final.parent / f"{_GUARD}{digest}"
        if not _take(guard):
            return False
        try:
            with self.draft(name) as draft:
                self._fill(draft, data, "")
                return self.put_over(draft, name, version)
        finally:
            guard.unlink(missing_ok=True)

    def log(self, name: str) -> LogFile:
        """Open a file that is appended to."""
        return LocalLog(self.path / name)

    def remove(self, name: str) -> None:
        """Unlink a file."""
        (self.path / name).unlink(missing_ok=True)

    def move(self, name: str, to: str) -> None:
        """Rename a file."""
        target = self.path / to
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a twin was first
            (self.path / name).rename(target)

    def check(self) -> None:
        """Raise RequestError unless the folder is, or can become, one on a disk with room."""
        out = self.path
        if out.exists() and not out.is_dir():
            raise RequestError(f"--out {str(out)!r} is a file; wanted a folder")
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise RequestError(f"--out {str(out)!r}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise RequestError(f"--out {str(out)!r}: no permission to write to {nearest}")
        free = shutil.disk_usage(nearest).free
        if free < FREE_BYTES:
            raise RequestError(f"--out {str(out)!r}: only {free >> 20} MiB are free on that disk")

    def prepare(self) -> None:
        """Make the folder; temporary files of the dead are found where they lie, and go there."""
        self.path.mkdir(parents=True, exist_ok=True)

    def clear(self, folder: str, after_each: Callable[[], None]) -> None:
        """Remove a folder's files, a live twin's temporary ones left alone, then the folder."""
        place = self.path / folder
        if not place.is_dir():
            return
        for name in sorted(os.listdir(place)):
            path = place / name
            if not is_temporary(name) or is_orphan(path):
                path.unlink(missing_ok=True)
                after_each()
        self.prune(folder)

    def prune(self, folder: str) -> None:
        """Remove an empty folder."""
        with contextlib.suppress(OSError):
            (self.path / folder).rmdir()

    def move_all(self, to: str, *, but: str, last: str) -> None:
        """Rename all that lies here into a new folder in it."""
        (self.path / to).mkdir()
        names = [name for name in os.listdir(self.path) if not name.startswith(but)]
        for name in sorted(names, key=lambda name: (name == last, name)):
            (self.path / name).rename(self.path / to / name)

    def _fill(self, draft: Draft, data: bytes, point: str) -> None:
        assert isinstance(draft, LocalDraft)
        write_bytes(draft.path, data)
        if point:
            reach(point)


def _is_hidden(name: str) -> bool:
    return is_temporary(name) or name.startswith(_GUARD)


def _stat_of(status: os.stat_result) -> Stat:
    version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
    return Stat(status.st_size, version, status.st_mtime)


def _take(guard: Path) -> bool:
    """Make a guard that nobody else has; one that its process left behind goes first."""
    guard.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            try:
                age = time.time() - guard.stat().st_mtime
            except FileNotFoundError:
                continue
            if age < GUARD_SECONDS:
                return False
            with contextlib.suppress(FileNotFoundError):
                # By a rename, so that of many who find it stale only one takes it away.
                stale = guard.with_name(f"{guard.name}-{secrets.token_hex(4)}")
                guard.rename(stale)
                stale.unlink()
        else:
            return True
    return False
