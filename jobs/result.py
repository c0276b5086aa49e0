"""How a run ended, in numbers, in words, and as an exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jobs.stopping import EXIT_AGAIN
from jobs.terminal import plural, printable, time_text
from pipeline.output.folder import OutFolder
from pipeline.output.resume import FAILED_FILE, PROGRESS, FolderState
from pipeline.throughput import THROUGHPUT, Snapshot
from pipeline.verdict import Tuning, table

EXIT_DONE, EXIT_FAILED, EXIT_REQUEST = 0, 1, 2
MAX_FAILED_SHOWN = 10


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    out: OutFolder
    before: FolderState
    after: FolderState
    snapshot: Snapshot
    tuning: Tuning
    errors: Counter[str]  # code -> rows of this run
    failed: dict[str, str]  # shard id -> why
    stopped: str = ""  # why it ended early
    limit: int | None = None  # reached
    has_too_many_errors: bool = False
    is_claiming: bool = False  # the shards were everybody's

    @property
    def num_open(self) -> int:
        """Shards that are neither done nor failed."""
        return len(self.after.shards) - self.after.num_done - len(self.failed)

    @property
    def num_shared(self) -> int:
        """Of these, shards that other workers have a part in, after a run that was not stopped."""
        return 0 if self.stopped or self.limit is not None else self.num_open

    @property
    def exit_code(self) -> int:
        """0 all done, 1 shards failed or too many rows did, 75 start me again."""
        if self.has_too_many_errors:
            return EXIT_FAILED
        if self.stopped and self.num_open:
            return EXIT_AGAIN
        return EXIT_FAILED if self.failed else EXIT_DONE


def plan_line(before: FolderState) -> str:
    """Say what there is to do."""
    kept = f"; {plural(before.num_rows, 'row')} kept" if before.num_rows else ""
    if before.num_redo:
        kept += f"; {plural(before.num_redo, 'sample')} of finished shards made again"
    return (
        f"{plural(len(before.shards), 'shard')}: {before.num_done} done, "
        f"{before.num_partly_done} partly done, {before.num_to_do} to do{kept}"
    )


def summary(result: RunResult) -> list[str]:
    """Say in lines what was done, what went wrong, and where the captions lie."""
    snapshot = result.snapshot
    resumed = f" ({snapshot.resumed_rows:,} rows were there before)" * bool(snapshot.resumed_rows)
    num_captioned = snapshot.images - snapshot.copied_images
    copied = f", {snapshot.copied_images:,} more copied from identical ones" * bool(
        snapshot.copied_images
    )
    lines = [
        f"{plural(num_captioned, 'image')} captioned in {time_text(snapshot.seconds)}"
        f"{copied}{resumed}"
    ]
    if result.errors:
        codes = ", ".join(f"{count} {code}" for code, count in result.errors.most_common())
        rows = plural(snapshot.error_rows, "row")
        verb = "is an error" if snapshot.error_rows == 1 else "are errors"
        lines.append(f"{rows} of these {verb}: {codes}")
    if snapshot.images:
        lines += ["", *table(snapshot, result.tuning), ""]
    lines += _ending(result)
    lines += _failures(result)
    lines += _places(result)
    return [printable(line) for line in lines]


def _ending(result: RunResult) -> list[str]:
    if result.has_too_many_errors:
        return [f"stopped by --max-error-rate: {result.stopped}; what was finished is committed"]
    if result.stopped and result.num_open:
        return [f"stopped by {result.stopped}; all that was finished is committed: start me again"]
    if result.limit is not None:
        return [
            f"stopped at --limit {result.limit}: a shard that goes on behind it is not whole, "
            "its rows wait as pieces; a run without --limit goes on from there"
        ]
    if result.num_shared:
        return [
            f"{plural(result.num_shared, 'shard')} shared with other workers: whoever commits "
            "the last rows makes the file; `captionjob verify` tells if all is there"
        ]
    return []


def _failures(result: RunResult) -> list[str]:
    if not result.failed:
        return []
    lines = [
        f"{plural(len(result.failed), 'shard')} failed, see {result.out.place(FAILED_FILE)}; "
        "what they held is kept, the next run tries again"
    ]
    shown = list(result.failed.items())[:MAX_FAILED_SHOWN]
    lines += [f"  {shard_id}: {reason}" for shard_id, reason in shown]
    if len(result.failed) > len(shown):
        lines.append(f"  and {len(result.failed) - len(shown)} more")
    return lines


def _places(result: RunResult) -> list[str]:
    after = result.after
    lines = []
    if after.num_done:
        files = plural(after.num_done, "file")
        lines.append(f"captions    {result.out.url}/*.parquet ({files})")
    if after.num_partly_done:
        rows = sum(state.num_rows for state in after.shards if not state.is_done)
        pieces = f"{result.out.place(PROGRESS)}/*/*.parquet"
        lines.append(f"unfinished  {pieces} ({plural(rows, 'row')})")
    if result.snapshot.images:
        lines.append(f"throughput  {result.out.place(THROUGHPUT)}")
    return lines
