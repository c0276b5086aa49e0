"""`export` and `import` as the command line has them: options in, lines for people out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.export.options import ExportOptions
from jobs.export.run import ExportRequest, export
from jobs.imports import import_label_studio
from jobs.terminal import plural, printable


def run_export(
    out: str, dest: str, to: str, shards: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    """Export, and say what was written and what was left out."""
    table = options["table"]
    request = ExportRequest(
        out=out,
        to=to,
        dest=Path(dest),
        shards=shards,
        statuses=options["statuses"],
        min_logprob=options["min_logprob"],
        where=options["where"],
        uses_corrections=options["captions"] == "corrected",
        overwrite=options["overwrite"],
        options=ExportOptions(
            field=options["field"],
            replace=options["replace"],
            with_images=not options["no_images"],
            image_url=options["image_url"],
            table=None if table is None else Path(table),
            on=options["on"],
        ),
    )
    done = export(request)
    checked = "" if done.is_checked else " (without --shards their join to images is not checked)"
    print(printable(f"{plural(done.num_rows, 'row')} -> {done.dest}{checked}"))
    if done.num_unfinished:
        print(f"left out: {plural(done.num_unfinished, 'shard')} that the job has not finished")
    if done.num_without_shard:
        print(f"left out: the rows of {plural(done.num_without_shard, 'shard')} not in --shards")


def run_import(out: str, file: str) -> None:
    """Import, and say how much people changed."""
    done = import_label_studio(out, Path(file))
    agreed = done.num_answers - done.num_changed
    skipped = f"; {plural(done.num_skipped, 'task')} without an answer" if done.num_skipped else ""
    where = done.stored if done.stored is not None else "nothing new: stored before"
    print(
        printable(
            f"{plural(done.num_answers, 'answer')}: {done.num_changed:,} changed, {agreed:,} as "
            f"the model had them{skipped} -> {where}"
        )
    )
