"""The seam between the store and the place where its files lie: a disk, or an object store.

Names are relative, with `/` between folders: `a-1f.parquet`, `_progress/a-1f/00000-w.parquet`.
Whatever the place, a name holds a complete file or none, at any moment and after any crash:

    local   hidden temporary file, flushed to disk, then linked or renamed   pipeline.output.local
    s3://   one put, or a multipart upload completed at once                 pipeline.output.s3

Missing files are FileNotFoundError; a disk's faults are OSError, a store's are JobError.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from pipeline.errors import RequestError
from pipeline.output.waiting import LOOKING, Waiting


@dataclass(frozen=True, slots=True)
class Stat:
    """What a listing tells of a file; `version` is another after each replacement."""

    size: int
    version: str
    modified: float  # seconds since 1970, by the clock of the place


class Draft(Protocol):
    """A file in the making, that nobody sees until the folder is asked to give it a name."""

    def writing(self) -> AbstractContextManager[BinaryIO]:
        """Open it once for writing; at the end of the block it is as safe as the place allows."""
        ...

    def reading(self) -> AbstractContextManager[BinaryIO]:
        """Open what was written."""
        ...


class LogFile(Protocol):
    """A file that grows while it is read by others."""

    def append(self, data: bytes, *, is_last: bool) -> None:
        """Add whole lines; readers see all of them or none."""
        ...

    def close(self) -> None:
        """Let the file go."""
        ...


@runtime_checkable
class OutFolder(Protocol):
    """An output folder; safe on any thread, beside any number of other processes."""

    @property
    def url(self) -> str:
        """What people call it; never with credentials."""
        ...

    @property
    def title(self) -> str:
        """Its last name, for pages."""
        ...

    def place(self, name: str) -> str:
        """Return what people call a file in it."""
        ...

    @property
    def absence(self) -> str:
        """Say what a reader should know if nothing is in it: that it is not there at all."""
        ...

    def holds(self, path: Path) -> bool:
        """True for a path of this machine that is the folder or lies in it."""
        ...

    # Looking; nothing is written.

    def names(self, folder: str = "") -> list[str]:
        """Return what lies directly in a folder, sorted, without drafts; [] if there is none."""
        ...

    def walk(self, folder: str = "", *, is_deep: bool = True) -> dict[str, Stat]:
        """Return the files of a folder, and with `is_deep` of those below, by their whole name."""
        ...

    def stat(self, name: str) -> Stat | None:
        """Look at one file; None if it is not there."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole small file."""
        ...

    def read_version(self, name: str) -> tuple[bytes, str]:
        """Return a whole small file, and which version of it these bytes are."""
        ...

    def read_tail(self, name: str, num_bytes: int) -> bytes:
        """Return the end of a file."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading at any place in it.

        One that is no file of Arrow's must not be read on Arrow's threads: they would come for
        the interpreter's lock when it is gone, at exit, and abort the process.
        """
        ...

    def garbage(self, folder: str) -> list[str]:
        """Return whole names of drafts in a folder whose process has ended."""
        ...

    # Writing. `point` is the fault point between a file's last byte and its name.

    def draft(self, name: str) -> AbstractContextManager[Draft]:
        """Give a new file that may become `name`, and remove it at the end."""
        ...

    def put_new(self, draft: Draft, name: str) -> bool:
        """Give a draft its name if nobody has it yet; False if another process was first."""
        ...

    def put_over(self, draft: Draft, name: str, version: str | None = None) -> bool:
        """Give a draft its name in place of any file, or of that very version; else False."""
        ...

    def create_if_absent(self, name: str, data: bytes, point: str = "") -> bool:
        """Put a small file if there is none of that name; of many who try, one gets True."""
        ...

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Put a small file in place of an older one, or of none."""
        ...

    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> bool:
        """Put a small file in place of that very version; of many who try, one gets True.

        The data must differ from the old: to some stores equal bytes are the same version.
        """
        ...

    def log(self, name: str) -> LogFile:
        """Begin a file that grows."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def move(self, name: str, to: str) -> None:
        """Give a file another name, if it is there."""
        ...

    # The whole folder, and folders in it.

    def check(self) -> None:
        """Raise RequestError unless files can be written here; nothing visible is written."""
        ...

    def prepare(self) -> None:
        """Make it ready for files, and clear away what writers that died left half done."""
        ...

    def clear(self, folder: str, after_each: Callable[[], None]) -> None:
        """Remove a folder's files, all of which a twin may be removing too, or writing to."""
        ...

    def prune(self, folder: str) -> None:
        """Remove a folder if nothing lies in it."""
        ...

    def move_all(self, to: str, *, but: str, last: str) -> None:
        """Move everything into the folder `to`, except what begins with `but`; `last` at the end.

        If that is cut short, what is left is still the old folder, and can be moved again.
        """
        ...


Where = OutFolder | Path | str
UPLOADS = "_uploads"  # of a folder in an object store: notes of what is under way


def open_folder(where: Where, waiting: Waiting = LOOKING) -> OutFolder:
    """Return the folder that a path or an address names; nothing is looked at.

    Raises RequestError for an address of another kind, or where an extra is not installed.
    """
    if isinstance(where, (str, Path)):
        scheme, has_scheme, _ = str(where).partition("://")
        if scheme == "s3" and has_scheme:
            from pipeline.output.s3 import S3Folder

            return S3Folder(str(where), waiting)
        if has_scheme:
            raise RequestError(f"OUT {str(where)!r}: wanted a folder or s3://BUCKET/PREFIX")
        from pipeline.output.local import LocalFolder

        return LocalFolder(Path(where))
    return where
