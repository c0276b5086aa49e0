"""Plots as SVG inside the page: text stays text, and colours are the page's own variables.

Matplotlib draws in stand-in colours that no plot would use; each is then replaced by a CSS
variable, so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.report.gather import Facts
from jobs.report.timeline import STAGES, Numbers, Timeline
from pipeline.errors import RequestError
from pipeline.records import STATUSES

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError:
    raise RequestError(
        "the page's plots need matplotlib: pip install 'captionjob[report]'"
    ) from None

INK, FAINT, LINE = "#010203", "#010204", "#010205"
COLOURS = tuple(f"#01030{place}" for place in range(1, 7))
VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    LINE: "var(--line)",
    **{colour: f"var(--plot-{place})" for place, colour in enumerate(COLOURS, 1)},
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": FAINT,
}
STATUS_COLOURS = dict(zip(STATUSES, (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[3]), strict=True))


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing, its title, and what it shows for those who cannot see it."""

    title: str
    summary: str
    svg: str


def plots_of(facts: Facts, timeline: Timeline | None) -> list[Plot]:
    """Draw all that there are numbers for."""
    found = []
    if timeline is not None:
        found += [_speed(timeline), _stages(timeline), _slots(timeline)]
    found.append(_trouble(facts))
    if facts.num_captions:
        found.append(_lengths(facts))
    if facts.mean_logprob is not None:
        found.append(_logprobs(facts))
    return found


def draw(name: str, paint: Callable[[Axes], None], *, height: float = 2.5) -> str:
    """Paint one pair of axes and return it as SVG that takes the width it is given."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<svg height=\"[^\"]*\"", "<svg", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\1{name}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _speed(timeline: Timeline) -> Plot:
    seconds, unit = _time(timeline.seconds)

    def paint(axes: Axes) -> None:
        x, (y,) = _to_edges(seconds, [timeline.images_per_second])
        axes.fill_between(x, y, color=COLOURS[0], alpha=0.16, linewidth=0)
        axes.plot(x, y, color=COLOURS[0], linewidth=1.6)
        axes.set(xlabel=unit, ylabel="images/s", ylim=(0, None))
        axes.margins(x=0)

    mean = timeline.total.images_per_second
    if timeline.num_workers > 1:
        mean = timeline.total.images / max(1e-9, _run_seconds(timeline))
    peak = float(np.nanmax(timeline.images_per_second, initial=0))
    return Plot(
        "Images a second",
        f"{mean:.1f} images a second on average, {peak:.1f} at most",
        draw("speed", paint),
    )


def _stages(timeline: Timeline) -> Plot:
    seconds, unit = _time(timeline.seconds)
    shares = [np.nan_to_num(timeline.stages[stage]) for stage in STAGES]
    shares.append(np.clip(1 - sum(shares, np.zeros(len(seconds))), 0, 1))

    def paint(axes: Axes) -> None:
        x, ys = _to_edges(seconds, shares)
        colours = [COLOURS[3], COLOURS[1], COLOURS[2], COLOURS[0], COLOURS[4], LINE]
        axes.stackplot(x, *ys, labels=[*STAGES, "other"], colors=colours, linewidth=0, alpha=0.9)
        axes.set(xlabel=unit, ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.margins(x=0)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 1.2),
            ncols=6,
            handlelength=1,
            columnspacing=1,
            handletextpad=0.4,
        )

    total = timeline.total
    parts = ", ".join(
        f"{stage} {getattr(total, f'{stage}_seconds') / max(1e-9, total.seconds):.0%}"
        for stage in STAGES
    )
    return Plot("Where the time went", parts, draw("stages", paint))


def _slots(timeline: Timeline) -> Plot:
    seconds, unit = _time(timeline.seconds)

    def paint(axes: Axes) -> None:
        x, (busy, padding) = _to_edges(seconds, [timeline.slots_busy, timeline.padding])
        axes.plot(x, busy, color=COLOURS[0], linewidth=1.6, label="slots busy")
        axes.plot(x, padding, color=COLOURS[3], linewidth=1.6, label="padding in prefill")
        axes.set(xlabel=unit, ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.margins(x=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)

    total = timeline.total
    return Plot(
        "Slots and padding",
        f"slots busy {total.slots_busy:.0%}, padding {total.padding_share:.0%} of prefill",
        draw("slots", paint),
    )


def _trouble(facts: Facts) -> Plot:
    """Show where in the job rows went wrong: a damaged shard stands out as a step."""
    num_bins = int(min(60, max(1, facts.num_rows // 5)))
    bins = np.linspace(0, facts.num_rows, num_bins + 1)
    total = np.histogram(np.arange(facts.num_rows), bins)[0]
    bad = [status for status in STATUSES if status != "ok"]
    shares = [
        np.histogram(np.flatnonzero(facts.status_codes == STATUSES.index(status)), bins)[0]
        / np.maximum(1, total)
        for status in bad
    ]

    def paint(axes: Axes) -> None:
        bottom = np.zeros(num_bins)
        for status, share in zip(bad, shares, strict=True):
            width = float(bins[1] - bins[0])
            colour = STATUS_COLOURS[status]
            axes.bar(bins[:-1], share, width, bottom, align="edge", color=colour, label=status)
            bottom = bottom + share
        axes.set(xlabel="rows, in the order of the shards", xlim=(0, facts.num_rows))
        axes.set_ylim(0, max(0.05, min(1.0, 1.15 * float(bottom.max()))))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3)

    share = 1 - facts.share("ok")
    return Plot("Rows that are not ok", f"{share:.1%} of all rows", draw("trouble", paint))


def _lengths(facts: Facts) -> Plot:
    parts = [
        (status, facts.num_tokens[facts.status_codes == STATUSES.index(status)])
        for status in STATUSES
        if status != "error" and facts.statuses[status]
    ]

    def paint(axes: Axes) -> None:
        longest = max(int(lengths.max()) for _, lengths in parts)
        bins = np.arange(0, longest + 2, max(1, (longest + 2) // 48)) - 0.5
        _stacked(axes, parts, bins)
        axes.set(xlabel="tokens of the caption", ylabel="rows")

    return Plot(
        "Caption length", f"{facts.mean_tokens:.1f} tokens on average", draw("lengths", paint)
    )


def _logprobs(facts: Facts) -> Plot:
    is_known = ~np.isnan(facts.logprobs)
    parts = [
        (status, facts.logprobs[is_known & (facts.status_codes == STATUSES.index(status))])
        for status in STATUSES
        if status != "error" and facts.statuses[status]
    ]
    known = facts.logprobs[is_known]
    median = float(np.median(known))

    def paint(axes: Axes) -> None:
        low, high = float(known.min()), float(known.max())
        _stacked(axes, parts, np.linspace(low, high if high > low else low + 1e-3, 41))
        axes.axvline(median, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel="mean log-probability of a token (right: surer)", ylabel="rows")

    return Plot("Confidence", f"median {median:.3g} (dashed)", draw("logprobs", paint))


def _stacked(axes: Axes, parts: Sequence[tuple[str, npt.NDArray[Any]]], bins: Numbers) -> None:
    axes.hist(
        [values for _, values in parts],
        bins=list(bins),
        stacked=True,
        color=[STATUS_COLOURS[status] for status, _ in parts],
        label=[status for status, _ in parts],
        rwidth=0.9,
    )
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(parts) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3)


def _time(seconds: Numbers) -> tuple[Numbers, str]:
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds[-1] > 2 * size:
            return seconds / size, unit
    return seconds, "seconds"


def _to_edges(x: Numbers, ys: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Draw from the middle of the outer slices on to their edges; a single slice is a line."""
    edges = np.array([0.0, *x, x[-1] + x[0]])
    return edges, [np.array([y[0], *y, y[-1]]) for y in ys]


def _run_seconds(timeline: Timeline) -> float:
    """Return the wall time in which anybody ran."""
    if len(timeline.seconds) < 2:
        return float(2 * timeline.seconds[0])
    width = float(timeline.seconds[1] - timeline.seconds[0])
    return width * int(np.sum(~np.isnan(timeline.images_per_second)))
