"""The job's progress: a bar on a terminal, plain lines elsewhere, from the first second."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol, TextIO

from jobs.terminal import plural, printable, time_text
from pipeline.throughput import Snapshot

LINE_SECONDS = 5.0
FIRST_LINE_SECONDS = 1.0
WIDTH = 100  # of a bar on a terminal that does not tell its own


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the job is: images finished, earlier runs' among them, and how many in all."""

    num_images: int
    num_total: int | None  # estimated from the bytes read; None: nothing to go by yet
    snapshot: Snapshot
    images_seen: int = 0  # that the reader has passed,
    bytes_seen: float = 0.0  # in so many bytes

    @property
    def seconds_left(self) -> float | None:
        """At this run's own rate."""
        rate = self.snapshot.finished_per_second
        if self.num_total is None or not rate:
            return None
        return max(0, self.num_total - self.num_images) / rate

    def rates(self) -> str:
        """The numbers that change."""
        return (
            f"{self.snapshot.images_per_second:.1f} images/s, "
            f"{self.snapshot.tokens_per_second:.0f} tokens/s, "
            f"slots {self.snapshot.slots_busy:.0%} busy"
        )


class Display(Protocol):
    """Where progress is shown."""

    def begin(self, worker: str) -> None:
        """Say under which name this worker runs."""
        ...

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def show(self, standing: Standing) -> None:
        """Show how far the job is."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, worker: str) -> None:
        """Drop the name."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def show(self, standing: Standing) -> None:
        """Drop the numbers."""

    def close(self) -> None:
        """Do nothing."""


class PlainLines:
    """A line every few seconds, for log files."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._next = time.monotonic() + FIRST_LINE_SECONDS

    def begin(self, worker: str) -> None:
        """Show no name: the throughput file has it."""

    def say(self, text: str) -> None:
        """Write a line at once."""
        print(f"captionjob: {printable(text)}", file=self._stream, flush=True)

    def show(self, standing: Standing) -> None:
        """Write a line if the last one is some seconds old."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        total = f" of about {standing.num_total:,}" if standing.num_total else ""
        left = standing.seconds_left
        end = f", {time_text(left)} left" if left is not None else ""
        images = plural(standing.num_images, "image")
        self.say(f"{images}{total}, {standing.rates()}{end}")

    def close(self) -> None:
        """Write no last line: the summary follows."""


class Bar:
    """A tqdm bar whose total is an estimate that gets better."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on the terminal behind `stream`."""
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # no thread of its own: the job's ticker draws
        self._stream = stream
        has_width = os.get_terminal_size(stream.fileno()).columns > 0  # some pipes claim 0
        self._bar = tqdm.tqdm(
            total=1,
            file=stream,
            dynamic_ncols=has_width,
            ncols=None if has_width else WIDTH,
            nrows=None if has_width else 2,
            bar_format="{percentage:3.0f}%|{bar}| {desc} [{elapsed}]",
        )
        self._bar.set_description_str("starting")

    def begin(self, worker: str) -> None:
        """Show no name: the throughput file has it."""

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.write(f"captionjob: {printable(text)}", file=self._stream)

    def show(self, standing: Standing) -> None:
        """Redraw."""
        total = standing.num_total or 0
        left = standing.seconds_left
        end = f", {time_text(left)} left" if left is not None else ""
        of_total = f"/{total:,}" if total else ""
        self._bar.total = max(total, standing.num_images, 1)
        self._bar.n = standing.num_images
        self._bar.set_description_str(
            f"{standing.num_images:,}{of_total} images, {standing.rates()}{end}"
        )

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        self._bar.close()


def display_on(stream: TextIO) -> Display:
    """Return a bar for a terminal, plain lines for anything else."""
    return Bar(stream) if stream.isatty() else PlainLines(stream)
