"""BLEU-4 and CIDEr-D against values that pycocoevalcap 1.2 gave for the same captions."""

from __future__ import annotations

import math

import pytest

from jobs.scores import Scores, bleu4, cider_d, score, tokenise

SET = [
    (
        "a dog runs on the beach",
        ["a brown dog runs along the beach", "a dog running on sand", "the dog is at the beach"],
    ),
    (
        "two cups of coffee on a table",
        ["two cups of coffee sit on a wooden table", "coffee on a table"],
    ),
    (
        "a man riding a horse",
        ["a woman rides a bicycle down the street", "a person on a bike"],
    ),
    ("a cat a cat a cat", ["a cat sleeping on a sofa", "a small cat on a couch", "a cat naps"]),
    ("red bus", ["a red double decker bus driving down a city street with people on it"]),
]


def test_the_values_of_the_coco_evaluation() -> None:
    found = score(SET)
    assert found.num_images == 5
    assert found.bleu4 == pytest.approx(0.20514250429438946, rel=1e-9)
    assert found.cider_d == pytest.approx(1.5794270445516616, rel=1e-9)


def test_each_image_of_the_coco_evaluation() -> None:
    """The set's CIDEr-D is the mean of these, so each alone is right."""
    wanted = [2.0861113, 4.90453132, 0.0, 0.75244974, 0.15404286]
    assert score(SET).cider_d == pytest.approx(sum(wanted) / 5, abs=1e-7)


def test_bleu_worked_out_by_hand() -> None:
    """Precisions 4/5, 2/4, 1/3 and 0/2: no four words in a row, so no BLEU-4 to speak of."""
    words = ["a", "b", "c", "x", "e"]
    assert bleu4([(words, [["a", "b", "c", "d", "e"]])]) == pytest.approx(
        (4 / 5 * 2 / 4 * 1 / 3 * 1e-15 / 2) ** 0.25, rel=1e-6
    )
    same = ["a", "b", "c", "d"]
    assert bleu4([(same, [same])]) == pytest.approx(1.0, abs=1e-8)
    short = bleu4([(same, [["a", "b", "c", "d", "e", "f", "g", "h"]])])
    assert short == pytest.approx(math.exp(1 - 8 / 4), rel=1e-6)


def test_the_same_caption_has_cider_ten() -> None:
    pairs = [(words.split(), [words.split()]) for words in ("a b c d", "e f g h", "i j k l")]
    assert cider_d(pairs) == pytest.approx(10.0)


def test_words_that_every_reference_has_weigh_nothing() -> None:
    pairs = [(["the", "thing", "here", "now"], [["the", "thing", "here", "now"]]) for _ in range(3)]
    assert cider_d(pairs) == 0


def test_nothing_to_score() -> None:
    assert score([]) == score([("a dog", [])]) == Scores(0, 0.0, 0.0)
    assert score([("", ["a dog"])]).bleu4 == 0


def test_words() -> None:
    text = "The dog’s well-known ball isn't red; don't look! 中文 5"
    wanted = "the|dog|'s|well-known|ball|is|n't|red|do|n't|look|中文|5"
    assert "|".join(tokenise(text)) == wanted
