"""`captionjob inspect`: what shards hold and whether they are whole, without a model."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jobs.terminal import bytes_text, plural, printable
from pipeline.errors import ShardError
from pipeline.images.formats import sniff, sniff_foreign
from pipeline.images.opening import facts_of
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.records import ImageFacts, Sample, Shard

EXIT_WHOLE, EXIT_DAMAGED = 0, 1
MAX_NAME = 48  # columns of a shard's name in the table


@dataclass(slots=True)
class ShardReport:
    """What one shard holds; only headers of pictures are read, no pixels are decoded."""

    shard: Shard
    stats: ShardStats = field(default_factory=ShardStats)
    formats: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # code -> samples
    fields: Counter[str] = field(default_factory=Counter)  # name -> samples that have it
    num_image_bytes: int = 0
    num_repeated_keys: int = 0
    num_repeated_images: int = 0  # byte for byte, of this shard or one before
    smallest: tuple[int, int] | None = None  # width, height
    largest: tuple[int, int] | None = None
    damage: str = ""

    def add(self, sample: Sample, facts: ImageFacts) -> None:
        """Count one sample."""
        self.num_image_bytes += len(sample.data)
        self.fields.update(sample.fields.keys())
        fault = _fault_of(sample, facts)
        if fault:
            self.faults[fault] += 1
        if sample.data:
            self.formats[facts.format or sniff_foreign(sample.data) or "unknown"] += 1
        if facts.width:
            size = (facts.width, facts.height)
            self.smallest = min(self.smallest or size, size, key=_pixels)
            self.largest = max(self.largest or size, size, key=_pixels)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON has it."""
        return {
            "shard": self.shard.id,
            "url": self.shard.url,
            "bytes": self.shard.size,
            "samples": self.stats.num_images,
            "image_bytes": self.num_image_bytes,
            "formats": dict(self.formats.most_common()),
            "fields": dict(self.fields.most_common()),
            "smallest": self.smallest,
            "largest": self.largest,
            "faults": dict(self.faults.most_common()),
            "junk": dict(self.stats.junk.most_common()),
            "repeated_keys": self.num_repeated_keys,
            "repeated_images": self.num_repeated_images,
            "damage": self.damage or None,
        }


def inspect_shards(
    shards: Sequence[Shard], settings: ReaderSettings | None = None, *, as_json: bool = False
) -> int:
    """Read all shards and print what they hold, each as it is read; return 1 if any is damaged."""
    table = Table(shards)
    if not as_json:
        print(table.head)
    reports = []
    seen: set[bytes] = set()
    for shard in shards:
        reports.append(inspect_shard(shard, settings, seen))
        if not as_json:
            for line in table.lines(reports[-1]):
                print(printable(line), flush=True)
    if as_json:
        found = {"shards": [one.to_json() for one in reports], "total": _total(reports)}
        print(json.dumps(found, indent=2))
    else:
        print(_total_line(reports))
    return EXIT_DAMAGED if any(report.damage for report in reports) else EXIT_WHOLE


def inspect_shard(
    shard: Shard, settings: ReaderSettings | None = None, seen: set[bytes] | None = None
) -> ShardReport:
    """Read one shard to its end, or to its damage; `seen` are hashes of images read before."""
    report = ShardReport(shard)
    seen = set() if seen is None else seen
    keys: set[str] = set()
    try:
        for sample in read_shard(shard, settings, stats=report.stats):
            facts = facts_of(sample.data)
            report.add(sample, facts)
            report.num_repeated_keys += sample.ref.key in keys
            keys.add(sample.ref.key)
            digest = bytes.fromhex(facts.sha256)[:12]
            report.num_repeated_images += bool(digest) and digest in seen
            seen.add(digest)
    except ShardError as error:
        report.damage = error.detail
    return report


def _fault_of(sample: Sample, facts: ImageFacts) -> str:
    """Say by which code the sample's row will fail, as far as its header tells, or ``""``."""
    if sample.fault is not None:
        return sample.fault.code
    if not sample.data:
        return "empty"
    if not sniff(sample.data):
        return "unsupported" if sniff_foreign(sample.data) else "unreadable"
    return "" if facts.width else "header not read"


class Table:
    """A line for each shard in columns as wide as its longest name, and lines for what is odd."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Take the width from the names."""
        self._names = {shard.id: printable(os.path.basename(shard.url)) for shard in shards}
        longest = max((len(name) for name in self._names.values()), default=0)
        self._width = min(MAX_NAME, max(len("shard"), longest))

    @property
    def head(self) -> str:
        """The names of the columns."""
        name = "shard".ljust(self._width)
        return f"{name} {'samples':>8} {'bytes':>9} {'smallest':>11} {'largest':>11}  formats"

    def lines(self, report: ShardReport) -> Iterator[str]:
        """Yield the lines of one shard."""
        name = self._names[report.shard.id][-self._width :].ljust(self._width)
        formats = ", ".join(f"{count} {kind}" for kind, count in report.formats.most_common())
        yield (
            f"{name} {report.stats.num_images:8} {bytes_text(report.num_image_bytes):>9} "
            f"{_size_text(report.smallest):>11} {_size_text(report.largest):>11}  {formats or '-'}"
        )
        fields = [f"{count} {name}" for name, count in report.fields.most_common(8)]
        if fields:
            yield f"    fields: {', '.join(fields)}{', ...' if len(report.fields) > 8 else ''}"
        for title, counts in (("faults", report.faults), ("junk", report.stats.junk)):
            if counts:
                found = ", ".join(f"{count} {what}" for what, count in counts.most_common(8))
                yield f"    {title}: {found}"
        for what, count in (
            ("key", report.num_repeated_keys),
            ("image", report.num_repeated_images),
        ):
            if count:
                yield f"    duplicates: {plural(count, f'repeated {what}')}"
        if report.damage:
            yield f"    DAMAGED: {report.damage}"


def _total(reports: Sequence[ShardReport]) -> dict[str, int]:
    return {
        "shards": len(reports),
        "samples": sum(report.stats.num_images for report in reports),
        "faults": sum(report.faults.total() for report in reports),
        "junk": sum(report.stats.junk.total() for report in reports),
        "repeated_images": sum(report.num_repeated_images for report in reports),
        "damaged": sum(bool(report.damage) for report in reports),
    }


def _total_line(reports: Sequence[ShardReport]) -> str:
    total = _total(reports)
    return (
        f"{plural(total['shards'], 'shard')}, {plural(total['samples'], 'sample')}, "
        f"{plural(total['faults'], 'fault')}, {plural(total['junk'], 'junk member')}, "
        f"{total['damaged']} damaged"
    )


def _pixels(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _size_text(size: tuple[int, int] | None) -> str:
    return f"{size[0]}x{size[1]}" if size else "-"
