"""What an output folder was made with: `OUT/_job.json`, written once, compared ever after.

It holds every setting that shapes captions and what identifies the model. How fast the same
captions are made (workers, slots, batch sizes) is not in it, and may change from run to run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RequestError
from pipeline.fault_points import reach
from pipeline.output.commit import publish, temporary_file, write_text
from pipeline.output.schema import SCHEMA_VERSION

JOB_FILE = "_job.json"
OLD_PREFIX = "_old-"
FREE_BYTES = 16 << 20  # less is no room for one piece and its final file

Setting = str | int | float | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The settings that shape captions, by name, in the order in which they are shown."""

    settings: Mapping[str, Setting]

    @property
    def fingerprint(self) -> str:
        """A hash over all settings and the schema: equal jobs, equal fingerprints."""
        text = json.dumps([SCHEMA_VERSION, dict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the text of `_job.json`, which is also the metadata of each Parquet file."""
        record = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings),
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"

    def differences(self, found: Mapping[str, object]) -> list[str]:
        """Say field by field how the settings found in an output folder differ from these."""
        names = [*self.settings, *(name for name in found if name not in self.settings)]
        return [
            f"{name}: {_shown(found, name)} there, {_shown(self.settings, name)} now"
            for name in names
            if _shown(found, name) != _shown(self.settings, name)
        ]


def check_folder(out: Path, record: JobRecord, *, overwrite: bool = False) -> None:
    """Raise RequestError unless `out` can take this job's rows; nothing is written.

    It can if it is not there yet, is empty, or was made with the same settings; with
    `overwrite` any output of captionjob will do.
    """
    check_place(out)
    if (out / JOB_FILE).exists() and not overwrite:
        _check_same(out, record)


def check_place(out: Path) -> None:
    """Raise RequestError unless `out` is, or can become, a folder of captionjob's on this disk."""
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
    if not out.exists() or (out / JOB_FILE).exists():
        return
    foreign = sorted(name for name in os.listdir(out) if not name.startswith((".", OLD_PREFIX)))
    if foreign:
        raise RequestError(
            f"--out {str(out)!r} is not empty and was not made by captionjob "
            f"(it holds {foreign[0]!r} and no {JOB_FILE}); choose another folder"
        )


def claim_folder(out: Path, record: JobRecord, *, overwrite: bool = False) -> Path | None:
    """Make `out` this job's folder; return where an older output was moved, if there was one.

    Any number of workers may claim the same folder for the same job at once.
    """
    check_folder(out, record, overwrite=overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
        moved = _move_aside(out) if overwrite and (out / JOB_FILE).exists() else None
        with temporary_file(out, JOB_FILE) as temporary:
            write_text(temporary, record.to_json())
            reach("job-written")
            publish(temporary, out / JOB_FILE)
    except OSError as error:
        raise RequestError(
            f"--out {str(out)!r} cannot be written: {error.strerror or error}"
        ) from error
    _check_same(out, record)
    return moved


def _check_same(out: Path, record: JobRecord) -> None:
    try:
        found = json.loads((out / JOB_FILE).read_text(encoding="utf-8"))
        settings, version = dict(found["settings"]), found["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{out / JOB_FILE} cannot be read as a job's settings ({error}); "
            "choose another --out, or --overwrite to move that output aside"
        ) from None
    differences = record.differences(settings)
    if version != SCHEMA_VERSION:
        differences.append(f"schema_version: {version} there, {SCHEMA_VERSION} now")
    if differences:
        raise RequestError(
            f"--out {str(out)!r} was made with other settings ({'; '.join(differences)}); "
            "choose another folder, or --overwrite to move that output aside"
        )


def _move_aside(out: Path) -> Path:
    """Rename all that lies in `out` into a folder beside it, `_job.json` last.

    If that is cut short, what is left is still the old job's folder.
    """
    old = out / f"{OLD_PREFIX}{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    old.mkdir()
    names = [name for name in os.listdir(out) if not name.startswith(OLD_PREFIX)]
    for name in sorted(names, key=lambda name: (name == JOB_FILE, name)):
        (out / name).rename(old / name)
    return old


def _shown(settings: Mapping[str, object], name: str) -> str:
    if name not in settings:
        return "nothing"
    return json.dumps(settings[name], ensure_ascii=False)
