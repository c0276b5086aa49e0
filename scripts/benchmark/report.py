"""What was measured, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scripts.benchmark.contest import Standing, agreement, ratio


def contest_table(standings: Sequence[Standing]) -> list[str]:
    """Write a contest: a line each, ours first; `ours` is how many times as fast ours is."""
    ours = standings[0].outcome
    assert ours is not None, "a contest was not run"
    lines = [
        f"{'contender':<48}{'images/s':>9}{'ours':>8}{'busy':>7}{'padding':>9}"
        f"{'tokens equal':>14}{'rows':>9}"
    ]
    for standing in standings:
        outcome = standing.outcome
        assert outcome is not None, "a contest was not run"
        same = agreement(ours, outcome)
        counts = outcome.counts
        lines.append(
            f"{standing.entry.contender.name:<48}{standing.rate:>9.3f}"
            f"{ratio(standings[0], standing):>7.2f}x{_percent(counts.get('slots_busy')):>7}"
            f"{_percent(counts.get('padding')):>9}{same.share:>13.2%}"
            f" {same.num_equal_rows:>4}/{same.num_rows}"
        )
    return lines


def shares_line(standing: Standing) -> str:
    """Say where our engine's seconds went."""
    assert standing.outcome is not None
    counts = standing.outcome.counts
    parts = [f"{what} {counts[f'{what}_share']:.0%}" for what in ("vision", "prefill", "decode")]
    before_tail = _percent(counts.get("slots_busy_before_tail"))
    return (
        f"captionjob: slots busy {before_tail} until no request was left; "
        f"time: {', '.join(parts)}, waiting {counts['waiting_share']:.1%}; "
        f"{counts['decode_steps']:.0f} decode steps of {counts['decode_step_ms']:.1f} ms"
    )


def stage_table(alone: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Write milliseconds of stages alone, a line a stage and a column a contender."""
    names = list(dict.fromkeys(name for times in alone.values() for name in times))
    lines = [f"{'milliseconds, stages alone':<28}" + "".join(f"{name:>16}" for name in names)]
    for stage, times in alone.items():
        cells = (f"{times[name]:>16.1f}" if name in times else f"{'-':>16}" for name in names)
        lines.append(f"{stage:<28}" + "".join(cells))
    return lines


def reading_line(shares: Mapping[int, float]) -> str:
    """Say at what share of the memory's speed our decode step reads weights and cache, by rows."""
    parts = (f"{share:.0%} with {rows}" for rows, share in shares.items())
    return f"a decode step reads at this share of the memory's speed: {', '.join(parts)} rows"


def facts(values: Iterable[tuple[str, object]]) -> list[str]:
    """Write names and values, a line each."""
    return [f"{name.replace('_', ' '):<40}{value}" for name, value in values]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
