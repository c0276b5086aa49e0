"""An output folder as its readers see it: what made it, which files count, and their rows.

Nothing here writes. A folder may be read while its job runs: a shard's rows are those of its
file, or of its pieces until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.rows import rows_of
from pipeline.errors import JobError, RequestError
from pipeline.input.identity import ShardIdentity
from pipeline.output.folder import OutFolder, Stat, Where, open_folder
from pipeline.output.job_record import JOB_FILE, JobRecord, Setting
from pipeline.output.merge import Part, merged
from pipeline.output.resume import (
    META_JOB,
    META_SHARD,
    PROGRESS,
    final_name,
    read_rows,
)
from pipeline.output.schema import SCHEMA_VERSION, RowSchema
from pipeline.records import Columns, Row

_THREADS = 16  # footers are read over a network more often than not


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that does not count, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The rows of one shard: in one file if it is done, else in pieces."""

    id: str
    identity: ShardIdentity
    folder: OutFolder
    names: tuple[str, ...]
    num_rows: int  # of pieces, those that twins made twice are counted twice
    is_done: bool

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows by index and caption index, or some columns of them.

        Raises JobError for a file that cannot be read.
        """
        try:
            if self.is_done:
                chosen = None if columns is None else list(columns)
                return read_rows(self.folder, self.names[0], chosen)
            wanted = None if columns is None else [*dict.fromkeys(["index", *columns])]
            parts = [_part(read_rows(self.folder, name, wanted)) for name in self.names]
            tables = list(merged(parts))
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{self.folder.place(self.names[0])}: {error}") from error
        table = pa.concat_tables(tables)
        return table if columns is None else table.select(list(columns))

    def rows(self) -> Iterator[Row]:
        """Return the rows as the records that the job made them from."""
        return rows_of(self.table())


@dataclass(frozen=True, slots=True)
class Output:
    """An output folder that was made by captionjob."""

    folder: OutFolder
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


def read_output(folder: Where) -> Output:
    """Find out what a folder holds; RequestError if captionjob did not make it."""
    return OutputReader(open_folder(folder)).read()


@dataclass(slots=True)
class OutputReader:
    """Reads the same folder again and again; the footer of a file that stays is read once."""

    folder: OutFolder
    _footers: dict[tuple[str, str], _Footer | str] = field(default_factory=dict)

    def read(self) -> Output:
        """Find out what the folder holds now; RequestError if captionjob did not make it."""
        folder = self.folder
        record = read_record(folder)
        started: dict[str, dict[str, Stat]] = {}
        for name, stat in sorted(folder.walk(PROGRESS).items()):
            if name.endswith(".parquet"):
                started.setdefault(name.split("/")[1], {})[name] = stat
        # In this order: a shard that is finished meanwhile is seen, perhaps twice, never missed.
        finals = {
            name: stat
            for name, stat in folder.walk(is_deep=False).items()
            if name.endswith(".parquet") and not name.startswith((".", "_"))
        }
        pieces = {
            shard_id: found
            for shard_id, found in started.items()
            if final_name(shard_id) not in finals
        }
        files = [finals, *pieces.values()]
        footers = self._read_footers({name: stat for one in files for name, stat in one.items()})
        faults: list[Fault] = []
        shards = [
            *(
                self._result(name.removesuffix(".parquet"), [name], record, footers, faults)
                for name in sorted(finals)
            ),
            *(
                self._result(shard_id, list(found), record, footers, faults)
                for shard_id, found in pieces.items()
            ),
        ]
        return Output(folder, record, tuple(filter(None, shards)), tuple(faults))

    def _result(
        self,
        shard_id: str,
        names: Sequence[str],
        record: JobRecord,
        footers: Mapping[str, _Footer | str | None],
        faults: list[Fault],
    ) -> ShardResult | None:
        """Look at a shard's files; those that cannot be trusted become faults."""
        good: list[str] = []
        identity = None
        num_rows = 0
        for name in names:
            footer = footers[name]
            if footer is None:
                continue  # the shard was finished this moment
            if isinstance(footer, str):
                faults.append(Fault(name, footer))
            elif footer.fingerprint != record.fingerprint:
                reason = f"made with other settings ({footer.fingerprint}"
                faults.append(Fault(name, f"{reason}, not {record.fingerprint})"))
            elif identity is not None and footer.identity != identity:
                faults.append(Fault(name, "a piece of another version of its shard"))
            else:
                identity = footer.identity
                num_rows += footer.num_rows
                good.append(name)
        if identity is None:
            return None
        is_done = "/" not in good[0]
        return ShardResult(shard_id, identity, self.folder, tuple(good), num_rows, is_done)

    def _read_footers(self, files: Mapping[str, Stat]) -> dict[str, _Footer | str | None]:
        """Return each file's footer, what is wrong with it, or None if it went meanwhile."""
        known = self._footers
        self._footers = {
            (name, stat.version): known[name, stat.version]
            for name, stat in files.items()
            if (name, stat.version) in known
        }
        new = [name for name, stat in files.items() if (name, stat.version) not in known]
        with ThreadPoolExecutor(_THREADS) as pool:
            found = dict(zip(new, pool.map(partial(_read_footer, self.folder), new), strict=True))
        for name, footer in found.items():
            if footer is not None:
                self._footers[name, files[name].version] = footer
        return {
            name: found[name] if name in found else self._footers[name, stat.version]
            for name, stat in files.items()
        }


@dataclass(frozen=True, slots=True)
class _Footer:
    """What a file says of itself."""

    identity: ShardIdentity
    fingerprint: str
    num_rows: int


def read_record(folder: OutFolder) -> JobRecord:
    """Read `_job.json`; RequestError if there is none that makes sense."""
    place = folder.place(JOB_FILE)
    try:
        found = json.loads(folder.read(JOB_FILE))
        settings: Mapping[str, Setting] = dict(found["settings"])
        version = found["schema_version"]
    except (FileNotFoundError, NotADirectoryError):
        what = folder.absence or f"was not made by captionjob: it holds no {JOB_FILE}"
        raise RequestError(f"OUT {folder.url!r} {what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{place} cannot be read as a job's settings ({error})") from None
    if version != SCHEMA_VERSION:
        raise RequestError(f"{place} has the schema version {version}; wanted {SCHEMA_VERSION}")
    return JobRecord(settings)


def _read_footer(folder: OutFolder, name: str) -> _Footer | str | None:
    try:
        with folder.open(name) as file:
            found = pq.read_metadata(file)
        return _Footer(
            ShardIdentity.from_json(found.metadata[META_SHARD].decode()),
            found.metadata[META_JOB].decode(),
            int(found.num_rows),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no Parquet file of captionjob ({type(error).__name__})"


def _part(table: pa.Table) -> Part:
    first = table.column("index")[0].as_py() if table.num_rows else 0
    return Part(int(first), lambda: table)


def _texts(value: Setting) -> list[str]:
    return value if isinstance(value, list) else []
