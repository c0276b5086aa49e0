"""A row as JSON has it: the columns of the output, by name."""

from __future__ import annotations

from jobs.export.source import ExportRow

JsonRow = dict[str, str | int | float | None]


def row_json(row: ExportRow) -> JsonRow:
    """Return all columns of a row, kept fields and corrections among them."""
    one = row.row
    found: JsonRow = {
        "shard": one.ref.shard,
        "index": one.ref.index,
        "caption_index": one.caption_index,
        "key": one.ref.key,
        "member": one.ref.member,
        "caption": one.caption,
        "status": one.status,
        "error": one.error,
        "error_detail": one.error_detail,
        "finish_reason": one.finish_reason,
        "num_prompt_tokens": one.num_prompt_tokens,
        "num_caption_tokens": one.num_caption_tokens,
        "mean_logprob": one.mean_logprob,
        "width": one.facts.width or None,
        "height": one.facts.height or None,
        "format": one.facts.format or None,
        "sha256": one.facts.sha256 or None,
        **one.kept,
    }
    if row.correction is not None:
        found["corrected_caption"] = row.correction.corrected_caption
        found["corrected_by"] = row.correction.corrected_by
        found["corrected_at"] = row.correction.corrected_at
    return found
