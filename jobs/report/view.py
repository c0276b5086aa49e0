"""`report` as the command line has it: options in, a line for people out."""

from __future__ import annotations

from pathlib import Path

from jobs.report.make import ReportRequest, make_report
from jobs.status_view import alarm_lines
from jobs.terminal import bytes_text, plural, printable


def print_report(out: str, shards: tuple[str, ...], to: str, pictures: int, seed: int) -> None:
    """Write the page, and say where it is and what it warns of."""
    made = make_report(ReportRequest(out, shards, Path(to), pictures, seed))
    print(
        printable(
            f"{plural(made.num_rows, 'row')}, {plural(made.num_pictures, 'picture')} "
            f"({bytes_text(made.num_bytes)}) -> {made.path}"
        )
    )
    for line in alarm_lines(made.facts.alarms):
        print(printable(line))
