"""What every family checks of its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import RequestError, SampleError


def check_placeholders(ids: Sequence[int], image_token_id: int, wanted: int) -> None:
    """Raise SampleError unless a prompt has a place for each of its image features."""
    found = ids.count(image_token_id)
    if found != wanted:
        raise SampleError(
            "placeholder_mismatch", f"{found} image places in the prompt, {wanted} image features"
        )


def check_system(system: str | None, special_tokens: frozenset[str]) -> str | None:
    """Return a system prompt; RequestError if it holds a special token, which would be read."""
    held = [token for token in special_tokens if system and token in system]
    if held:
        raise RequestError(f"--system holds the special token {held[0]}; wanted plain text")
    return system
