"""A folder of pictures becomes WebDataset shards that any reader of such tars takes.

Pictures go in byte for byte, in natural order of their paths, each with the `.txt` and `.json`
that lie beside it under the same name. The tars depend on nothing but the files: no times, no
owners. They appear under their names only once all are written.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipeline.errors import JobError, RequestError
from pipeline.input.folder import Findings, Picture, find_pictures, with_keys
from pipeline.input.shards import natural_key

_NUMBER = re.compile(r"%(0?)([0-9]*)d|\{([0-9]+)\.\.([0-9]*)\}|\{\}")

Progress = Callable[[int, int], None]  # images packed, images in all


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How large a shard may grow; the first limit that is reached ends it."""

    max_samples: int = 1000
    max_bytes: int = 300 << 20
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, found in (("max-samples", self.max_samples), ("max-bytes", self.max_bytes)):
            if found < 1:
                raise RequestError(f"--{name} is {found}; wanted 1 or more")


@dataclass(slots=True)
class PackSummary:
    """What was packed, and what was not."""

    shards: list[str] = field(default_factory=list)
    num_images: int = 0
    num_fields: int = 0
    num_bytes: int = 0  # of the pictures and fields
    findings: Findings = field(default_factory=Findings)
    stale: list[str] = field(default_factory=list)  # of an earlier pack, beside the new ones


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names that `--out` stands for: `photos-%06d.tar`, `photos-{000000..}.tar`, or `{}`."""

    folder: str
    before: str
    after: str
    width: int
    first: int = 0
    last: int | None = None

    @classmethod
    def parse(cls, pattern: str) -> ShardNames:
        """Find the place of the number; RequestError where there is none, or more than one."""
        folder, name = os.path.split(pattern)
        places = list(_NUMBER.finditer(name))
        if len(places) != 1 or _NUMBER.search(folder):
            raise RequestError(
                f"--out {pattern!r} has {len(places) or 'no'} place for a number in its name; "
                "wanted one, as in 'shards/photos-{000000..}.tar' or 'shards/photos-%06d.tar'"
            )
        if not name.endswith(".tar"):
            raise RequestError(f"--out {pattern!r} does not end in .tar; wanted plain tars")
        place = places[0]
        before, after = name[: place.start()], name[place.end() :]
        digits = place[3] or ""
        if place[0].startswith("%"):
            return cls(folder, before, after, int(place[2] or 1))
        last = int(place[4]) if place[4] else None
        return cls(folder, before, after, len(digits) or 6, int(digits or 0), last)

    def path(self, number: int) -> str:
        """Return the path of the shard `number`, counted from 0."""
        number += self.first
        if self.last is not None and number > self.last:
            raise RequestError(
                f"--out has room for {self.last - self.first + 1} shards, and more are needed; "
                "leave the last number out, or raise --max-samples and --max-bytes"
            )
        return os.path.join(self.folder, f"{self.before}{number:0{self.width}d}{self.after}")

    def existing(self) -> list[str]:
        """Return the files that already have such a name, in order."""
        wanted = re.compile(f"{re.escape(self.before)}[0-9]+{re.escape(self.after)}")
        folder = self.folder or "."
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found = [os.path.join(self.folder, name) for name in names if wanted.fullmatch(name)]
        return sorted(found, key=natural_key)


def pack_folder(
    folder: str | os.PathLike[str],
    out_pattern: str,
    settings: PackSettings | None = None,
    *,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack all pictures in and below a folder; return what was done.

    Raises RequestError, before anything is written, if the folder holds no picture, if the
    pattern has no number, or if shards of that name exist and may not be overwritten. A file
    that cannot be read is named in the summary and left out.
    """
    settings = settings or PackSettings()
    names = ShardNames.parse(out_pattern)
    summary = PackSummary()
    if not os.path.isdir(folder):
        raise RequestError(f"{os.fspath(folder)!r} is not a folder")
    pictures = find_pictures(Path(folder), summary.findings)
    if not pictures:
        raise RequestError(f"{os.fspath(folder)!r} holds no picture, nor do folders below it")
    existing = names.existing()
    if existing and not settings.overwrite:
        raise RequestError(
            f"{existing[0]} exists ({len(existing)} such files); choose another --out, "
            "or --overwrite"
        )
    try:
        os.makedirs(names.folder or ".", exist_ok=True)
        with _ShardSet(names, settings, summary) as shards:
            for number, (key, picture) in enumerate(with_keys(pictures)):
                sample = _read_sample(Path(folder), key, picture, summary)
                if sample:
                    shards.write(sample)
                if progress is not None:
                    progress(number + 1, len(pictures))
            shards.publish()
    except OSError as error:
        raise JobError(f"writing {out_pattern!r} failed: {error}") from error
    summary.stale = [path for path in existing if path not in summary.shards]
    return summary


def _read_sample(
    folder: Path, key: str, picture: Picture, summary: PackSummary
) -> dict[str, str | bytes]:
    """Return a sample as webdataset's writer takes it; empty if the picture is unreadable."""
    sample: dict[str, str | bytes] = {"__key__": key}
    for name, path in ((picture.extension, picture.path), *picture.siblings):
        try:
            if not stat.S_ISREG(os.stat(folder / path).st_mode):
                raise OSError(0, "not a regular file")
            sample[name] = (folder / path).read_bytes()
        except OSError as error:
            summary.findings.unreadable.append((path.as_posix(), error.strerror or str(error)))
            if path == picture.path:
                return {}
    summary.num_images += 1
    summary.num_fields += len(sample) - 2
    summary.num_bytes += sum(len(value) for name, value in sample.items() if name != "__key__")
    return sample


class _ShardSet:
    """Shards on their way: written beside their final names, renamed when all are whole."""

    def __init__(self, names: ShardNames, settings: PackSettings, summary: PackSummary) -> None:
        # Imported here because webdataset imports torch, and `captionjob --help` must not.
        from webdataset.writer import TarWriter

        self._new_writer = TarWriter
        self._names = names
        self._settings = settings
        self._summary = summary
        self._parts: list[tuple[str, str]] = []  # temporary path, final path
        self._file: IO[bytes] | None = None
        self._writer: Any = None
        self._num_samples = 0
        self._num_bytes = 0

    def __enter__(self) -> _ShardSet:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing half-made behind."""
        with contextlib.suppress(OSError, ValueError):
            self._finish()
        for part, _final in self._parts:
            if os.path.exists(part):
                os.unlink(part)

    def write(self, sample: dict[str, str | bytes]) -> None:
        size = sum(len(value) for value in sample.values())
        is_full = (
            self._num_samples >= self._settings.max_samples
            or self._num_bytes + size > self._settings.max_bytes
        )
        if self._writer is None or (is_full and self._num_samples):
            self._finish()
            self._begin()
        self._writer.write(sample)
        self._num_samples += 1
        self._num_bytes += size

    def publish(self) -> None:
        """Give all shards their names."""
        self._finish()
        for part, final in self._parts:
            os.replace(part, final)
            self._summary.shards.append(final)

    def _begin(self) -> None:
        final = self._names.path(len(self._parts))
        folder, name = os.path.split(final)
        part = os.path.join(folder, f".{name}.part")
        self._parts.append((part, final))
        self._file = open(part, "wb")  # noqa: SIM115  closed by _finish or __exit__
        self._writer = self._new_writer(
            self._file,
            encoder=False,
            mtime=0,
            user="",
            group="",
            format="PAX_FORMAT",  # USTAR has no room for long names
        )
        self._num_samples = self._num_bytes = 0

    def _finish(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._writer = self._file = None
