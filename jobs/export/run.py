"""`captionjob export`: choose the format, write beside the destination, rename at the end.

A destination is there whole or not at all, and nothing is replaced that was not made here.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from jobs.export.filters import CAPTIONED, Filters, filters_of
from jobs.export.options import ExportOptions
from jobs.export.source import Source
from jobs.joining import join_shards, need_shards
from jobs.results import Output, read_output
from pipeline.errors import JobError, RequestError
from pipeline.output.folder import Where
from pipeline.records import STATUSES

MARK = "_export.json"  # lies in folders that an export made; only these are replaced


class Writer(Protocol):
    """What each format's module has."""

    def write(self, source: Source, place: Path, options: ExportOptions) -> int:
        """Write to `place`, which is not there yet; return the rows written."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its module, and what it needs."""

    module: str
    is_folder: bool
    needs_shards: bool
    statuses: tuple[str, ...] = CAPTIONED  # without --status


FORMATS = {
    "webdataset": Format("webdataset", is_folder=True, needs_shards=True),
    "txt": Format("txt", is_folder=True, needs_shards=True),
    "jsonl": Format("jsonl", is_folder=False, needs_shards=False, statuses=STATUSES),
    "csv": Format("csv", is_folder=False, needs_shards=False, statuses=STATUSES),
    "parquet": Format("parquet", is_folder=False, needs_shards=False, statuses=STATUSES),
    "coco": Format("coco", is_folder=False, needs_shards=False),
    "label-studio": Format("label_studio", is_folder=False, needs_shards=False),
    "hf": Format("hf", is_folder=True, needs_shards=True),
}


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What the command line asks for."""

    out: Where
    to: str
    dest: Path
    shards: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    min_logprob: float | None = None
    where: tuple[str, ...] = ()
    uses_corrections: bool = True
    overwrite: bool = False
    options: ExportOptions = field(default_factory=ExportOptions)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what was left out."""

    dest: Path
    num_rows: int
    num_unfinished: int  # shards whose rows are still in pieces
    num_without_shard: int  # shards' files that --shards does not name
    is_checked: bool


def export(request: ExportRequest) -> Exported:
    """Write the export; RequestError, with nothing written, where the request is wrong.

    Raises ShardError where a row's image is not the one in the shard.
    """
    kind = FORMATS[request.to]
    filters = filters_of(request.statuses, kind.statuses, request.min_logprob, request.where)
    output = read_output(request.out)
    _check(request, kind, output)
    source = _source(request, output, filters)
    num_rows = _write(request, kind, source)
    join = source.join
    return Exported(
        dest=request.dest,
        num_rows=num_rows,
        num_unfinished=sum(not shard.is_done for shard in output.shards),
        num_without_shard=len(join.without_shard) if join else 0,
        is_checked=join is not None,
    )


def _source(request: ExportRequest, output: Output, filters: Filters) -> Source:
    join = need_shards(join_shards(output, request.shards)) if request.shards else None
    return Source.of(output, filters, join, uses_corrections=request.uses_corrections)


def _check(request: ExportRequest, kind: Format, output: Output) -> None:
    """Find what is wrong before anything is read for long."""
    embeds = request.to == "label-studio" and not request.options.image_url
    if (kind.needs_shards or embeds) and not request.shards:
        also = ", or their addresses by --image-url" if embeds else ""
        raise RequestError(f"--to {request.to} needs the pictures: name their --shards{also}")
    dest = request.dest.absolute().resolve()
    if output.folder.holds(dest):
        raise RequestError(f"DEST {str(request.dest)!r} lies in OUT; wanted another place")
    if not output.done:
        raise RequestError(f"OUT {output.folder.url!r} has no finished shard to export yet")
    if not dest.parent.is_dir():
        raise RequestError(f"DEST {str(request.dest)!r}: there is no folder {dest.parent}")
    if dest.exists() and not _may_replace(request, kind, dest):
        raise RequestError(
            f"DEST {str(request.dest)!r} is there already; wanted a new name"
            + (", or --overwrite" if kind.is_folder == dest.is_dir() else "")
        )


def _may_replace(request: ExportRequest, kind: Format, dest: Path) -> bool:
    if kind.is_folder != dest.is_dir():
        return False
    if kind.is_folder and not os.listdir(dest):
        return True
    return request.overwrite and (not kind.is_folder or (dest / MARK).is_file())


def _write(request: ExportRequest, kind: Format, source: Source) -> int:
    dest = request.dest.absolute()
    temporary = dest.with_name(f".tmp-{secrets.token_hex(4)}-{dest.name}")
    module = importlib.import_module(f"jobs.export.{kind.module}")
    try:
        num_rows = cast(Writer, module).write(source, temporary, request.options)
        if kind.is_folder:
            mark = {"to": request.to, "rows": num_rows, "job": json.loads(_job(source))}
            (temporary / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        _put(temporary, dest)
        for name, text in _companions(module, dest).items():
            (dest.parent / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"{dest} cannot be written: {error.strerror or error}") from error
    finally:
        _remove(temporary)
    return num_rows


def _put(temporary: Path, dest: Path) -> None:
    """Give the export its name; an older folder is gone only once the new one is there."""
    if not dest.is_dir():
        os.replace(temporary, dest)
        return
    old = dest.with_name(f".tmp-{secrets.token_hex(4)}-{dest.name}")
    dest.rename(old)
    temporary.rename(dest)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _job(source: Source) -> str:
    return source.output.record.to_json()


def _companions(module: object, dest: Path) -> dict[str, str]:
    found = getattr(module, "companions", None)
    return cast(dict[str, str], found(dest)) if found else {}
