"""Learn the merges of the byte-pair tokenizer from the captions themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from pipeline.processors.bpe import NUM_BYTES, WORD

SPECIALS = ("<pad>", "<eos>", "<image>")
VOCABULARY_SIZE = 2048


def learn_merges(texts: Iterable[str], count: int) -> list[tuple[int, int]]:
    """Return the `count` merges that byte-pair encoding learns; ties go to the lower ids."""
    words = Counter(word for text in texts for word in WORD.findall(text))
    split = {word: list(word.encode()) for word in words}
    merges: list[tuple[int, int]] = []
    while len(merges) < count:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        new = NUM_BYTES + len(merges) - 1
        split = {word: _merged(parts, best, new) for word, parts in split.items()}
    return merges


def _merged(parts: list[int], pair: tuple[int, int], new: int) -> list[int]:
    out: list[int] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] = new
        else:
            out.append(part)
    return out


def write_tokenizer(texts: Iterable[str], path: Path) -> None:
    """Learn a tokenizer and write it; `BytePairTokenizer.from_json` reads it."""
    merges = learn_merges(texts, VOCABULARY_SIZE - NUM_BYTES - len(SPECIALS))
    first = NUM_BYTES + len(merges)
    stored = {
        "merges": merges,
        "specials": {name: first + index for index, name in enumerate(SPECIALS)},
    }
    path.write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")
