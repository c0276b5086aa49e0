"""A status as lines for people; live on a terminal, plain elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TextIO

from jobs.alarms import Alarm
from jobs.status import Claim, Status, StatusReader
from jobs.terminal import plural, printable, time_text
from jobs.workers import Worker
from pipeline.output.folder import Where

MAX_FAILED_SHOWN = 10
MAX_CLAIMS_SHOWN = 5
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def status_lines(status: Status) -> list[str]:
    """Return how far a job is, line by line; nothing in them can act on a terminal."""
    lines = [_shards(status), _rows(status)]
    if status.errors:
        codes = ", ".join(f"{count:,} {code}" for code, count in status.errors.most_common())
        lines.append(f"errors   {codes}")
    if status.rate_now or status.running:
        lines.append(_speed(status))
    lines += _workers(status.workers)
    lines += _claims(status.claims)
    lines += _failed(status)
    lines += [f"not counted: {fault.name}: {fault.reason}" for fault in status.output.faults]
    lines += alarm_lines(status.alarms)
    return [printable(line) for line in lines]


def alarm_lines(alarms: Sequence[Alarm]) -> list[str]:
    """Return a line an alarm."""
    return [f"ALARM {alarm.code}: {alarm.message}" for alarm in alarms]


def watch(reader: StatusReader, stream: TextIO, seconds: float, max_looks: int = 0) -> None:
    """Show the status every `seconds` until the job is over; 0 looks are any number."""
    is_live = stream.isatty()
    num_looks = 0
    while True:
        num_looks += 1
        status = reader.read(alarms="finished")
        text = "\n".join(status_lines(status))
        if is_live:
            clock = time.strftime("%H:%M:%S")
            head = f"{printable(reader.folder.url)}  {clock}  (Ctrl-C ends this view, not the job)"
            print(f"{_HOME_AND_CLEAR}{head}\n\n{text}", file=stream, flush=True)
        else:
            print(_one_line(status), file=stream, flush=True)
        if status.is_over or num_looks == max_looks:
            if not is_live:
                print(text, file=stream, flush=True)
            return
        time.sleep(seconds)


def print_status(
    folder: Where,
    patterns: Sequence[str],
    stream: TextIO,
    *,
    as_json: bool,
    is_watching: bool,
    seconds: float,
) -> None:
    """Print the status once, or watch it."""
    reader = StatusReader(folder, patterns)
    if is_watching and not as_json:
        with contextlib.suppress(KeyboardInterrupt):  # the way to end a view of a live job
            watch(reader, stream, seconds)
        return
    status = reader.read(alarms="all")
    if as_json:
        print(status.to_json(), file=stream)
    else:
        print("\n".join(status_lines(status)), file=stream)


def _shards(status: Status) -> str:
    parts = [f"{status.num_done:,} done", f"{status.num_in_progress:,} in progress"]
    parts.append(f"{len(status.failed):,} failed")
    to_do = status.num_to_do
    parts.append("to do unknown (name --shards)" if to_do is None else f"{to_do:,} to do")
    total = f" of {status.num_shards:,}" if status.num_shards is not None else ""
    return f"shards   {', '.join(parts)}{total}"


def _rows(status: Status) -> str:
    total = f" of about {status.num_total:,}" if status.num_total is not None else ""
    names = ", ".join(f"{count:,} {name}" for name, count in sorted(status.statuses.items()))
    pending = f"; {status.num_pending_rows:,} in pieces" if status.num_pending_rows else ""
    return f"rows     {status.num_rows:,}{total}" + (f": {names}" if names else "") + pending


def _speed(status: Status) -> str:
    left = status.seconds_left
    end = f", {time_text(left)} left" if left is not None else ""
    return (
        f"speed    {status.rate_now:.1f} images/s of {plural(len(status.running), 'worker')}{end}"
    )


def _workers(workers: Sequence[Worker]) -> list[str]:
    """Return a table of the workers; of those that were replaced, only how many."""
    shown = [worker for worker in workers if worker.state != "replaced"]
    if not shown:
        return []
    rows = [("worker", "state", "images", "now/s", "run/s", "tokens/s", "slots", "waiting")]
    for worker in shown:
        snapshot = worker.last.snapshot
        rows.append(
            (
                worker.name,
                _state(worker),
                f"{snapshot.images:,}",
                f"{worker.rate_now:.1f}" if worker.state == "running" else "-",
                f"{worker.rate:.1f}",
                f"{snapshot.tokens_per_second:.0f}",
                f"{snapshot.slots_busy:.0%}",
                f"{snapshot.share(snapshot.waiting_seconds):.0%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["", *("  ".join(_cells(row, widths)).rstrip() for row in rows)]
    replaced = len(workers) - len(shown)
    return [*lines, f"and {plural(replaced, 'earlier run')} of these"] if replaced else lines


def _claims(claims: Sequence[Claim]) -> list[str]:
    """Return who holds what, the first few of them."""
    if not claims:
        return []
    shown = [f"{one.unit} by {one.worker}" for one in claims[:MAX_CLAIMS_SHOWN]]
    more = [f"and {len(claims) - MAX_CLAIMS_SHOWN:,} more"] * (len(claims) > MAX_CLAIMS_SHOWN)
    return [f"claims   {len(claims):,} held: {', '.join([*shown, *more])}"]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    pairs = list(zip(row, widths, strict=True))
    return [
        cell.ljust(width) if place < 2 else cell.rjust(width)
        for place, (cell, width) in enumerate(pairs)
    ]


def _state(worker: Worker) -> str:
    if worker.state == "stalled":
        return f"STALLED, no line for {time_text(worker.silent_seconds)}"
    return worker.state


def _failed(status: Status) -> list[str]:
    lines = [f"FAILED   {one.shard}: {one.reason}" for one in status.failed[:MAX_FAILED_SHOWN]]
    more = len(status.failed) - MAX_FAILED_SHOWN
    return [*lines, f"         and {more} more"] if more > 0 else lines


def _one_line(status: Status) -> str:
    total = f"/{status.num_total:,}" if status.num_total is not None else ""
    left = status.seconds_left
    end = f", {time_text(left)} left" if left is not None else ""
    stalled = f", {plural(len(status.stalled), 'stalled worker')}" if status.stalled else ""
    return (
        f"{time.strftime('%H:%M:%S')} {status.num_rows:,}{total} rows, "
        f"{status.num_done:,} shards done, {status.rate_now:.1f} images/s{end}{stalled}"
    )
