"""`captionjob import`: corrected captions come back from an annotation tool.

Each task is joined to its row by shard, index and caption index, and key and image hash must be
those of the row; so a file of another job, or of a shard that was packed anew, is refused whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.corrections import Correction, RowKey, key_of, store_corrections
from jobs.results import Output, read_output
from pipeline.errors import RequestError
from pipeline.output.folder import Where
from pipeline.records import Row

MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """What one person said of one task."""

    row_key: RowKey
    key: str
    sha256: str
    text: str
    by: str
    at: str
    source: str


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import found and stored."""

    stored: str | None  # None: all of it was stored before
    num_answers: int
    num_changed: int
    num_skipped: int  # tasks that nobody answered


def import_label_studio(out: Where, path: Path) -> Imported:
    """Store the corrections of a Label Studio export (JSON or JSON-MIN).

    Raises RequestError, with nothing stored, for what is no such file or of other rows.
    """
    output = read_output(out)
    answers: list[Answer] = []
    num_skipped = 0
    for place, task in enumerate(_tasks(path)):
        found = list(_answers(task, place))
        num_skipped += not found
        answers += found
    corrections = _joined(output, answers)
    stored = store_corrections(output.folder, corrections)
    num_changed = sum(one.is_change for one in corrections)
    return Imported(stored, len(corrections), num_changed, num_skipped)


def _tasks(path: Path) -> list[Mapping[str, object]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"FILE {str(path)!r} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"FILE {str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(task, dict) for task in found):
        raise RequestError(f"FILE {str(path)!r} is no list of Label Studio tasks")
    return found


def _answers(task: Mapping[str, object], place: int) -> Iterator[Answer]:
    """Yield what people said of a task; of a task with several annotations, each."""
    annotations = task.get("annotations")
    if isinstance(annotations, list):
        data = task.get("data")
        for one in annotations:
            if isinstance(one, dict) and not one.get("was_cancelled"):
                text = _text_of(one.get("result"))
                if text is not None:
                    at = str(one.get("updated_at") or one.get("created_at") or "")
                    by = _person(one.get("completed_by"))
                    number = f"label-studio annotation {one.get('id', '?')}"
                    yield _answer(data, place, text, by, at, number)
    elif "caption_index" in task or "index" in task:  # JSON-MIN: the answer beside the data
        text = _min_text(task.get("caption"))
        if text is not None and ("annotator" in task or "annotation_id" in task):
            at = str(task.get("updated_at") or task.get("created_at") or "")
            number = f"label-studio annotation {task.get('annotation_id', '?')}"
            yield _answer(task, place, text, _person(task.get("annotator")), at, number)


def _answer(data: object, place: int, text: str, by: str, at: str, source: str) -> Answer:
    if not isinstance(data, Mapping) or not isinstance(data.get("index"), int):
        raise RequestError(
            f"task {place + 1} has no shard and index in its data: it was not made by "
            "captionjob export --to label-studio"
        )
    row_key = (str(data.get("shard")), int(data["index"]), int(data.get("caption_index") or 0))
    sha256 = str(data.get("sha256") or "")
    return Answer(row_key, str(data.get("key")), sha256, text, by, at, source)


def _text_of(result: object) -> str | None:
    """Return the text of an annotation's text area; None if it has none."""
    for item in result if isinstance(result, list) else []:
        if isinstance(item, dict) and item.get("type") == "textarea":
            value = item.get("value")
            if isinstance(value, dict):
                return _min_text(value)
    return None


def _min_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, list):
        return "\n".join(str(part) for part in value) if value else None
    return value if isinstance(value, str) else None


def _person(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("email") or value.get("username") or value.get("id")
    return "" if value is None else str(value)


def _joined(output: Output, answers: list[Answer]) -> list[Correction]:
    """Put each answer to its row; RequestError if any has none, or another image's."""
    wanted = {answer.row_key for answer in answers}
    shards = {shard for shard, _, _ in wanted}
    rows: dict[RowKey, Row] = {}
    for result in output.shards:
        if result.id in shards:
            rows.update((key_of(row), row) for row in result.rows() if key_of(row) in wanted)
    strangers = [one for one in answers if not _is_of(one, rows.get(one.row_key))]
    if strangers:
        names = ", ".join(
            f"{one.row_key[0]} index {one.row_key[1]}" for one in strangers[:MAX_SHOWN]
        )
        raise RequestError(
            f"{len(strangers)} of {len(answers)} answers are of no row of OUT, or of another image "
            f"than its row ({names}); nothing was stored"
        )
    return [_correction(one, rows[one.row_key]) for one in answers]


def _is_of(answer: Answer, row: Row | None) -> bool:
    return row is not None and row.ref.key == answer.key and row.facts.sha256 == answer.sha256


def _correction(answer: Answer, row: Row) -> Correction:
    shard, index, caption_index = answer.row_key
    return Correction(
        shard=shard,
        index=index,
        caption_index=caption_index,
        key=row.ref.key,
        sha256=row.facts.sha256,
        caption=row.caption,
        corrected_caption=answer.text.encode("utf-8", "backslashreplace").decode(),
        corrected_by=answer.by,
        corrected_at=answer.at,
        source=answer.source,
    )
