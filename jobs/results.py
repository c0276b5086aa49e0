"""An output folder as its readers see it: what made it, which files count, and their rows.

Nothing here writes. A folder may be read while its job runs: a shard's rows are those of its
file, or of its pieces until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.rows import rows_of
from pipeline.errors import JobError, RequestError
from pipeline.input.identity import ShardIdentity
from pipeline.output.commit import is_temporary
from pipeline.output.job_record import JOB_FILE, JobRecord, Setting
from pipeline.output.merge import Part, merged
from pipeline.output.resume import (
    META_JOB,
    META_SHARD,
    PROGRESS,
    final_path,
    piece_paths,
    read_rows,
)
from pipeline.output.schema import SCHEMA_VERSION, RowSchema
from pipeline.records import Columns, Row


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that does not count, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The rows of one shard: in one file if it is done, else in pieces."""

    id: str
    identity: ShardIdentity
    paths: tuple[Path, ...]
    num_rows: int  # of pieces, those that twins made twice are counted twice
    is_done: bool

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows by index and caption index, or some columns of them.

        Raises JobError for a file that cannot be read.
        """
        try:
            if self.is_done:
                return read_rows(self.paths[0], None if columns is None else list(columns))
            wanted = None if columns is None else [*dict.fromkeys(["index", *columns])]
            tables = list(merged([_part(read_rows(path, wanted)) for path in self.paths]))
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{self.paths[0]}: {error}") from error
        table = pa.concat_tables(tables)
        return table if columns is None else table.select(list(columns))

    def rows(self) -> Iterator[Row]:
        """Return the rows as the records that the job made them from."""
        return rows_of(self.table())


@dataclass(frozen=True, slots=True)
class Output:
    """An output folder that was made by captionjob."""

    folder: Path
    record: JobRecord
    shards: tuple[ShardResult, ...] = ()
    faults: tuple[Fault, ...] = field(default=())

    @property
    def schema(self) -> RowSchema:
        """The columns of this job."""
        return RowSchema(self.num_captions, tuple(_texts(self.record.settings.get("keep"))))

    @property
    def num_captions(self) -> int:
        """Captions of each image."""
        found = self.record.settings.get("num_captions", 1)
        return found if isinstance(found, int) else 1

    @property
    def prompt(self) -> str:
        """The prompt's template."""
        return str(self.record.settings.get("prompt", ""))

    @property
    def columns(self) -> Columns:
        """The columns of Parquet shards that the user chose."""
        image, key = (self.record.settings.get(f"{name}_column") for name in ("image", "key"))
        return Columns(*(one if isinstance(one, str) else None for one in (image, key)))

    @property
    def model(self) -> str:
        """What `--model` named."""
        settings = self.record.settings
        return str(settings.get("model.model") or settings.get("model.name") or "unknown")

    @property
    def done(self) -> tuple[ShardResult, ...]:
        """Shards whose file is there."""
        return tuple(shard for shard in self.shards if shard.is_done)

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.num_rows for shard in self.shards)


def read_output(folder: Path) -> Output:
    """Find out what a folder holds; RequestError if captionjob did not make it."""
    return OutputReader(folder).read()


@dataclass(slots=True)
class OutputReader:
    """Reads the same folder again and again; the footer of a file that stays is read once."""

    folder: Path
    _footers: dict[tuple[Path, int, int], _Footer] = field(default_factory=dict)

    def read(self) -> Output:
        """Find out what the folder holds now; RequestError if captionjob did not make it."""
        folder = self.folder
        record = read_record(folder)
        faults: list[Fault] = []
        shards: dict[str, ShardResult] = {}
        for path in sorted(folder.glob("*.parquet")):
            if not path.name.startswith((".", "_")):
                found = self._result(path.stem, [path], record, faults, is_done=True)
                if found:
                    shards[found.id] = found
        started = folder / PROGRESS
        for place in sorted(started.iterdir()) if started.is_dir() else []:
            if place.name not in shards and not final_path(folder, place.name).exists():
                pieces = piece_paths(folder, place.name)
                found = self._result(place.name, pieces, record, faults, is_done=False)
                if found:
                    shards[found.id] = found
        return Output(folder, record, tuple(shards.values()), tuple(faults))

    def _result(
        self,
        shard_id: str,
        paths: Sequence[Path],
        record: JobRecord,
        faults: list[Fault],
        *,
        is_done: bool,
    ) -> ShardResult | None:
        """Look at a shard's files; those that cannot be trusted become faults."""
        good: list[Path] = []
        identity = None
        num_rows = 0
        for path in paths:
            if is_temporary(path.name):
                continue
            try:
                footer = self._footer(path)
            except FileNotFoundError:
                continue  # the shard was finished this moment
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f"no Parquet file of captionjob ({type(error).__name__})"
                faults.append(Fault(path, reason))
                continue
            if footer.fingerprint != record.fingerprint:
                reason = f"made with other settings ({footer.fingerprint}"
                faults.append(Fault(path, f"{reason}, not {record.fingerprint})"))
            elif identity is not None and footer.identity != identity:
                faults.append(Fault(path, "a piece of another version of its shard"))
            else:
                identity = footer.identity
                num_rows += footer.num_rows
                good.append(path)
        if identity is None:
            return None
        return ShardResult(shard_id, identity, tuple(good), num_rows, is_done)

    def _footer(self, path: Path) -> _Footer:
        status = path.stat()
        stamp = (path, status.st_mtime_ns, status.st_size)
        if stamp not in self._footers:
            found = pq.read_metadata(path)
            self._footers[stamp] = _Footer(
                ShardIdentity.from_json(found.metadata[META_SHARD].decode()),
                found.metadata[META_JOB].decode(),
                int(found.num_rows),
            )
        return self._footers[stamp]


@dataclass(frozen=True, slots=True)
class _Footer:
    """What a file says of itself."""

    identity: ShardIdentity
    fingerprint: str
    num_rows: int


def read_record(folder: Path) -> JobRecord:
    """Read `_job.json`; RequestError if there is none that makes sense."""
    path = folder / JOB_FILE
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise RequestError(f"OUT {str(folder)!r} {what}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings: Mapping[str, Setting] = dict(found["settings"])
        version = found["schema_version"]
    except FileNotFoundError:
        raise RequestError(
            f"OUT {str(folder)!r} was not made by captionjob: it holds no {JOB_FILE}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} cannot be read as a job's settings ({error})") from None
    if version != SCHEMA_VERSION:
        raise RequestError(f"{path} has the schema version {version}; wanted {SCHEMA_VERSION}")
    return JobRecord(settings)


def _part(table: pa.Table) -> Part:
    first = table.column("index")[0].as_py() if table.num_rows else 0
    return Part(int(first), lambda: table)


def _texts(value: Setting) -> list[str]:
    return value if isinstance(value, list) else []
