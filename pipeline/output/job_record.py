"""What an output folder was made with: `OUT/_job.json`, written once, compared ever after.

It holds every setting that shapes captions and what identifies the model. How fast the same
captions are made (workers, slots, batch sizes) is not in it, and may change from run to run.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import RequestError
from pipeline.output.folder import UPLOADS, OutFolder
from pipeline.output.schema import SCHEMA_VERSION

JOB_FILE = "_job.json"
OLD_PREFIX = "_old-"

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


def check_folder(out: OutFolder, record: JobRecord, *, overwrite: bool = False) -> None:
    """Raise RequestError unless `out` can take this job's rows; nothing visible is written.

    It can if it is not there yet, is empty, or was made with the same settings; with
    `overwrite` any output of captionjob will do.
    """
    check_place(out)
    if not overwrite and out.stat(JOB_FILE) is not None:
        _check_same(out, record)


def check_place(out: OutFolder) -> None:
    """Raise RequestError unless `out` is, or can become, a folder of captionjob's."""
    out.check()
    if out.stat(JOB_FILE) is not None:
        return
    names = out.names()
    if JOB_FILE in names:  # by now: a twin has claimed it this moment
        return
    for name in names:
        is_ours = name.startswith((".", OLD_PREFIX, UPLOADS))
        # Some stores go on listing folders whose objects are gone.
        if not is_ours and (out.stat(name) is not None or out.walk(name)):
            raise RequestError(
                f"--out {out.url!r} is not empty and was not made by captionjob "
                f"(it holds {name!r} and no {JOB_FILE}); choose another folder"
            )


def claim_folder(out: OutFolder, record: JobRecord, *, overwrite: bool = False) -> str | None:
    """Make `out` this job's folder; say where an older output was moved, if there was one.

    Any number of workers may claim the same folder for the same job at once.
    """
    check_folder(out, record, overwrite=overwrite)
    try:
        out.prepare()
        moved = None
        if overwrite and out.stat(JOB_FILE) is not None:
            moved = f"{OLD_PREFIX}{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
            out.move_all(moved, but=OLD_PREFIX, last=JOB_FILE)
        out.create_if_absent(JOB_FILE, record.to_json().encode(), "job-written")
    except OSError as error:
        raise RequestError(
            f"--out {out.url!r} cannot be written: {error.strerror or error}"
        ) from error
    _check_same(out, record)
    return None if moved is None else out.place(moved)


def _check_same(out: OutFolder, record: JobRecord) -> None:
    try:
        found = json.loads(out.read(JOB_FILE))
        settings, version = dict(found["settings"]), found["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{out.place(JOB_FILE)} cannot be read as a job's settings ({error}); "
            "choose another --out, or --overwrite to move that output aside"
        ) from None
    differences = record.differences(settings)
    if version != SCHEMA_VERSION:
        differences.append(f"schema_version: {version} there, {SCHEMA_VERSION} now")
    if differences:
        raise RequestError(
            f"--out {out.url!r} was made with other settings ({'; '.join(differences)}); "
            "choose another folder, or --overwrite to move that output aside"
        )


def _shown(settings: Mapping[str, object], name: str) -> str:
    if name not in settings:
        return "nothing"
    return json.dumps(settings[name], ensure_ascii=False)
