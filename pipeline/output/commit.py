"""Files that appear whole or not at all: write under a hidden name, flush to disk, rename.

    .tmp-HOST-PID-TOKEN-NAME   being written; readers of the folder skip names with a dot
    NAME                       complete, and on the disk

A temporary file whose process is gone is garbage and is removed; one of a live process, which
may be a twin of this worker, is left alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.fault_points import reach
from pipeline.output.folder import Draft

ORPHAN_SECONDS = 24 * 3600  # of another host, where nobody can ask if the process lives
_PREFIX = ".tmp-"
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def writer_name() -> str:
    """Return a name that tells this process, and is used once."""
    return f"{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"


def is_of_dead_process(writer: str) -> bool | None:
    """Tell from a writer's name whether its process has ended; None if it is of another host."""
    host, _, rest = writer.partition("-")
    pid = rest.partition("-")[0]
    if host != _HOST or not pid.isdigit():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # A container's first process has the number of its predecessor.
    return int(pid) == 1


def temporary_path(folder: Path, name: str) -> Path:
    """Return a hidden path in `folder` that no other process uses."""
    return folder / f"{_PREFIX}{writer_name()}-{name}"


def is_temporary(name: str) -> bool:
    """True for a name that `temporary_path` makes."""
    return name.startswith(_PREFIX)


def is_orphan(path: Path) -> bool:
    """True for a temporary file whose process has ended, as far as can be told from here."""
    is_dead = is_of_dead_process(path.name.removeprefix(_PREFIX))
    if is_dead is not None:
        return is_dead
    try:
        return time.time() - path.stat().st_mtime > ORPHAN_SECONDS
    except FileNotFoundError:
        return False


def write_parquet(draft: Draft, schema: pa.Schema, tables: Iterable[pa.Table], point: str) -> int:
    """Write tables to a draft, each a row group; return the rows read back.

    `point` is the fault point between the rows and the footer.
    """
    wanted = 0
    with draft.writing() as file:
        writer = pq.ParquetWriter(file, schema, compression="zstd")
        try:
            for table in tables:
                # Joined into one chunk, so that pages, and so bytes, do not depend on the pieces.
                writer.write_table(table.combine_chunks())
                wanted += table.num_rows
            reach(point)
        finally:
            writer.close()  # by an exception too: the short file is a draft, and goes
    with draft.reading() as file:
        found = int(pq.read_metadata(file).num_rows)
    if found != wanted:
        raise OSError(f"a new file: wrote {wanted} rows, read back {found}")
    return found


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small new file down to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, final: Path) -> bool:
    """Give a complete file its name if nobody has it yet; False if another process was first."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system: the last of two equal files wins
        if final.exists():
            return False
        os.replace(temporary, final)
    sync_folder(final.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder last through a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse; their renames are on the server already
    finally:
        os.close(descriptor)
