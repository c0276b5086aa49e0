"""Shards that could not be read to their end: a note with each, and one list of all.

The note lies with the shard's pieces, so that workers never write the same file at once; the
list `OUT/_failed.json` is made anew from the notes whenever one comes or goes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import ShardError
from pipeline.output.commit import replace_text
from pipeline.output.resume import FAILED_FILE, PROGRESS, progress_folder
from pipeline.records import Shard


def note_failure(out: Path, shard: Shard, error: ShardError) -> None:
    """Remember why a shard failed, beside what could be read of it."""
    note = {"shard": shard.id, "url": shard.url, "error": error.detail}
    folder = progress_folder(out, shard.id)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / FAILED_FILE, json.dumps(note, ensure_ascii=False), "failed-written")
    list_failures(out)


def list_failures(out: Path) -> list[str]:
    """Write `OUT/_failed.json` from the notes, or remove it if there is none; return the ids."""
    notes = []
    for path in sorted((out / PROGRESS).glob(f"*/{FAILED_FILE}")):
        try:
            notes.append(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            continue  # finished by a twin this moment
    if notes:
        text = json.dumps({"shards": notes}, indent=2, ensure_ascii=False) + "\n"
        replace_text(out / FAILED_FILE, text, "failed-written")
    else:
        (out / FAILED_FILE).unlink(missing_ok=True)
    return [note["shard"] for note in notes]
