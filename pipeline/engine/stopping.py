"""When a sequence ends: end token, stop string, repetition, length; each sequence by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 64
MIN_REPEATED_TOKENS = 24


@dataclass(frozen=True, slots=True)
class StopRules:
    """The rules of one job; `has_stop_text` looks at the ids so far, since the engine reads none.

    `max_repeats` counts how often a block of tokens may stand in a row (0: any number). A
    caption's least length holds back the end token alone, and that in sampling, not here.
    """

    eos_ids: frozenset[int]
    max_new_tokens: int
    max_repeats: int = 0
    has_stop_text: Callable[[Sequence[int]], bool] | None = None

    def finish_reason(self, token_ids: Sequence[int]) -> str | None:
        """Say why a caption of these tokens ends here, or None where it goes on."""
        num_tokens = len(token_ids)
        if token_ids[-1] in self.eos_ids:
            return "eos"
        if self.has_stop_text is not None and self.has_stop_text(token_ids):
            return "stop"
        if self.max_repeats and is_repeating(token_ids, self.max_repeats):
            return "repetition"
        return "length" if num_tokens >= self.max_new_tokens else None


def is_repeating(token_ids: Sequence[int], max_repeats: int) -> bool:
    """True if the last tokens are one block, of at most 64 tokens, `max_repeats` times over.

    A loop of short blocks must last for 24 tokens: "very, very, very, very" is a caption.
    """
    num_tokens, last = len(token_ids), token_ids[-1]
    for period in range(1, min(MAX_PERIOD, num_tokens - 1) + 1):
        if token_ids[-1 - period] != last:
            continue
        num_repeated = max(period * max_repeats, MIN_REPEATED_TOKENS)
        if num_repeated > num_tokens:
            continue
        tail = token_ids[num_tokens - num_repeated :]
        if tail[period:] == tail[:-period]:
            return True
    return False
