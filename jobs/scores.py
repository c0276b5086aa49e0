"""Captions against reference captions: BLEU-4 and CIDEr-D, without Java.

BLEU-4   Papineni et al. 2002, https://aclanthology.org/P02-1040, over the whole set, with the
         closest reference's length
CIDEr-D  Vedantam et al. 2015, https://arxiv.org/abs/1411.5726, document frequencies from the
         references of this set, sigma 6, times 10

Both are as in the COCO caption evaluation (pycocoevalcap) on the same tokens. Its tokeniser is
a Java program; the rules here are plainer, so figures can differ in the third digit from it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_N = 4
SIGMA = 6.0
_TINY, _SMALL = 1e-15, 1e-9  # as pycocoevalcap keeps logarithms finite

Gram = tuple[str, ...]
_WORD = re.compile(r"n't|'(?:s|re|ve|ll|d|m)\b|[^\W_]+?(?=n't)|[^\W_]+(?:-[^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Scores:
    """Both measures of one set of captions; higher is better."""

    num_images: int
    bleu4: float  # 0 to 1
    cider_d: float  # 0 to 10


def score(pairs: Sequence[tuple[str, Sequence[str]]]) -> Scores:
    """Score captions, each with its references; pairs without references are left out."""
    tokens = [
        (tokenise(caption), [tokenise(one) for one in references])
        for caption, references in pairs
        if references
    ]
    if not tokens:
        return Scores(0, 0.0, 0.0)
    return Scores(len(tokens), bleu4(tokens), cider_d(tokens))


def tokenise(text: str) -> list[str]:
    """Return the words in lower case, punctuation dropped, `dog's` and `don't` as two."""
    return _WORD.findall(text.lower().replace("’", "'"))


def bleu4(pairs: Sequence[tuple[list[str], list[list[str]]]]) -> float:
    """Return corpus BLEU with n-grams of up to 4 words."""
    matches, guesses = [0] * MAX_N, [0] * MAX_N
    length = closest = 0
    for words, references in pairs:
        length += len(words)
        closest += min((abs(len(one) - len(words)), len(one)) for one in references)[1]
        most: Counter[Gram] = Counter()
        for reference in references:
            most |= _grams(reference)
        for gram, count in _grams(words).items():
            matches[len(gram) - 1] += min(count, most[gram])
            guesses[len(gram) - 1] += count
    product = 1.0
    for matched, guessed in zip(matches, guesses, strict=True):
        product *= (matched + _TINY) / (guessed + _SMALL)
    ratio = (length + _TINY) / (closest + _SMALL)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    return float(product ** (1 / MAX_N) * penalty)


def cider_d(pairs: Sequence[tuple[list[str], list[list[str]]]]) -> float:
    """Return the mean CIDEr-D over the images."""
    frequencies: Counter[Gram] = Counter()
    for _, references in pairs:
        frequencies.update({gram for one in references for gram in _grams(one)})
    log_images = math.log(len(pairs))
    total = 0.0
    for words, references in pairs:
        mine = _vector(words, frequencies, log_images)
        total += sum(
            _similarity(mine, _vector(one, frequencies, log_images)) for one in references
        ) / len(references)
    return 10 * total / len(pairs)


@dataclass(frozen=True, slots=True)
class _Vector:
    """Weights of the n-grams of one caption, a table and a norm for each n."""

    weights: tuple[dict[Gram, float], ...]
    norms: tuple[float, ...]
    length: int


def _vector(words: list[str], frequencies: Counter[Gram], log_images: float) -> _Vector:
    weights: tuple[dict[Gram, float], ...] = tuple({} for _ in range(MAX_N))
    for gram, count in _grams(words).items():
        idf = log_images - math.log(max(1, frequencies[gram]))
        weights[len(gram) - 1][gram] = count * idf
    norms = tuple(math.sqrt(sum(value**2 for value in one.values())) for one in weights)
    # pycocoevalcap takes the number of bigrams for the length of a caption.
    return _Vector(weights, norms, max(0, len(words) - 1))


def _similarity(mine: _Vector, reference: _Vector) -> float:
    penalty = math.exp(-((mine.length - reference.length) ** 2) / (2 * SIGMA**2))
    total = 0.0
    for n in range(MAX_N):
        shared = sum(
            min(value, reference.weights[n].get(gram, 0.0)) * reference.weights[n].get(gram, 0.0)
            for gram, value in mine.weights[n].items()
        )
        norm = mine.norms[n] * reference.norms[n]
        total += shared / norm if norm else shared
    return penalty * total / MAX_N


def _grams(words: Sequence[str]) -> Counter[Gram]:
    return Counter(
        tuple(words[place : place + n])
        for n in range(1, MAX_N + 1)
        for place in range(len(words) - n + 1)
    )
