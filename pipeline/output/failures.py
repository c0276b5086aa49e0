"""Shards that could not be read to their end: a note with each, and one list of all.

The note lies with the shard's pieces, so that workers never write the same file at once; the
list `OUT/_failed.json` is made anew from the notes whenever one comes or goes.
"""

from __future__ import annotations

import json

from pipeline.errors import ShardError
from pipeline.output.folder import OutFolder
from pipeline.output.resume import FAILED_FILE, PROGRESS, progress_folder
from pipeline.records import Shard


def note_failure(out: OutFolder, shard: Shard, error: ShardError) -> None:
    """Remember why a shard failed, beside what could be read of it."""
    note = {"shard": shard.id, "url": shard.url, "error": error.detail}
    text = json.dumps(note, ensure_ascii=False)
    out.replace(f"{progress_folder(shard.id)}/{FAILED_FILE}", _bytes(text), "failed-written")
    list_failures(out)


def list_failures(out: OutFolder) -> list[str]:
    """Write `OUT/_failed.json` from the notes, or remove it if there is none; return the ids."""
    notes = read_notes(out)
    if notes:
        text = json.dumps({"shards": notes}, indent=2, ensure_ascii=False) + "\n"
        out.replace(FAILED_FILE, _bytes(text), "failed-written")
    else:
        out.remove(FAILED_FILE)
    return [note["shard"] for note in notes]


def read_notes(out: OutFolder) -> list[dict[str, str]]:
    """Return the notes of all shards that failed: `shard`, `url` and `error` of each."""
    notes = []
    for name in sorted(out.walk(PROGRESS)):
        if name.endswith(f"/{FAILED_FILE}"):
            try:
                found = json.loads(out.read(name))
                notes.append({key: str(found[key]) for key in ("shard", "url", "error")})
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # finished by a twin this moment
    return notes


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
