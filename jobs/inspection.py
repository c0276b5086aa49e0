"""`captionjob inspect`: what shards hold and whether they are whole, without a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.terminal import bytes_text, plural, printable
from pipeline.errors import ShardError
from pipeline.formats import sniff
from pipeline.images import facts_of
from pipeline.reader import ShardStats, read_shard
from pipeline.records import Sample, Shard
from pipeline.shards import expand_shards

EXIT_WHOLE, EXIT_DAMAGED = 0, 1


@dataclass(slots=True)
class ShardReport:
    """What one shard holds; only headers of pictures are read, no pixels are decoded."""

    shard: Shard
    stats: ShardStats = field(default_factory=ShardStats)
    formats: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # code -> samples
    num_image_bytes: int = 0
    num_repeated_keys: int = 0
    largest: tuple[int, int] = (0, 0)  # width, height
    damage: str = ""

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        self.num_image_bytes += len(sample.data)
        if sample.fault is not None:
            self.faults[sample.fault.code] += 1
            return
        fault = _fault_of(sample)
        if fault:
            self.faults[fault] += 1
        self.formats[sniff(sample.data) or "unknown"] += 1
        facts = facts_of(sample.data)
        if facts.width * facts.height > self.largest[0] * self.largest[1]:
            self.largest = (facts.width, facts.height)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON has it."""
        return {
            "shard": self.shard.id,
            "url": self.shard.url,
            "bytes": self.shard.size,
            "samples": self.stats.num_images,
            "image_bytes": self.num_image_bytes,
            "formats": dict(self.formats),
            "faults": dict(self.faults),
            "junk": dict(self.stats.junk),
            "repeated_keys": self.num_repeated_keys,
            "largest": list(self.largest),
            "damage": self.damage or None,
        }


def inspect_shards(patterns: Sequence[str], *, as_json: bool) -> int:
    """Read all shards and print what they hold; return 1 if any is damaged."""
    reports = [inspect_shard(shard) for shard in expand_shards(patterns)]
    if as_json:
        print(json.dumps({"shards": [report.to_json() for report in reports]}, indent=2))
    else:
        for line in _table(reports):
            print(printable(line))
    return EXIT_DAMAGED if any(report.damage for report in reports) else EXIT_WHOLE


def inspect_shard(shard: Shard) -> ShardReport:
    """Read one shard to its end, or to its damage."""
    report = ShardReport(shard)
    seen: set[str] = set()
    try:
        for sample in read_shard(shard, stats=report.stats):
            report.num_repeated_keys += sample.ref.key in seen
            seen.add(sample.ref.key)
            report.add(sample)
    except ShardError as error:
        report.damage = error.detail
    return report


def _fault_of(sample: Sample) -> str:
    if not sample.data:
        return "empty"
    return "" if sniff(sample.data) else "unreadable"


def _table(reports: Sequence[ShardReport]) -> list[str]:
    lines = []
    for report in reports:
        formats = ", ".join(f"{count} {name}" for name, count in report.formats.most_common())
        notes = [f"{count} {code}" for code, count in report.faults.most_common()]
        notes += [f"junk: {count} {reason}" for reason, count in report.stats.junk.most_common()]
        if report.num_repeated_keys:
            notes.append(f"{report.num_repeated_keys} repeated keys")
        width, height = report.largest
        lines.append(
            f"{report.shard.url}: {plural(report.stats.num_images, 'sample')} "
            f"({bytes_text(report.num_image_bytes)}), largest {width}x{height}; {formats or '-'}"
        )
        lines += [f"    {note}" for note in notes]
        if report.damage:
            lines.append(f"    DAMAGED: {report.damage}")
    num_samples = sum(report.stats.num_images for report in reports)
    num_damaged = sum(bool(report.damage) for report in reports)
    total = f"{plural(len(reports), 'shard')}, {plural(num_samples, 'sample')}"
    lines.append(f"{total}, {num_damaged} damaged")
    return lines
