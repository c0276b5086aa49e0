"""Byte-level byte-pair encoding (https://arxiv.org/abs/1508.07909) without a download.

Ids 0 to 255 are the bytes themselves, then come the merges in the order in which they were
learnt, then the special tokens. Text is cut into words, each with the space before it, and no
merge crosses a cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

NUM_BYTES = 256
WORD = re.compile(r" ?[^\W_]+| ?[^\w\s]+| ?_+|\s+")


class BytePairTokenizer:
    """Text to ids and back; every text round-trips, special tokens are never read from text."""

    def __init__(self, merges: Sequence[tuple[int, int]], specials: Mapping[str, int]) -> None:
        self.specials = dict(specials)
        self._bytes = [bytes([value]) for value in range(NUM_BYTES)]
        self._ranks: dict[tuple[int, int], int] = {}
        for left, right in merges:
            self._ranks[left, right] = len(self._bytes)
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._encode_word = lru_cache(maxsize=4096)(self._merge_word)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> BytePairTokenizer:
        """Build from what `tokenizer.json` holds: `merges` and `specials`."""
        return cls([(left, right) for left, right in stored["merges"]], stored["specials"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [token for word in WORD.findall(text) for token in self._encode_word(word)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens say nothing, broken UTF-8 becomes U+FFFD."""
        known = len(self._bytes)
        joined = b"".join(self._bytes[token] for token in ids if token < known)
        return joined.decode("utf-8", errors="replace")

    def _merge_word(self, word: str) -> tuple[int, ...]:
        parts = list(word.encode("utf-8", errors="replace"))
        while len(parts) > 1:
            ranked = [
                (self._ranks.get(pair, len(self._bytes)), place)
                for place, pair in enumerate(pairwise(parts))
            ]
            merged, place = min(ranked)
            if merged == len(self._bytes):
                break
            parts[place : place + 2] = [merged]
        return tuple(parts)
