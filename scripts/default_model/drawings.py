"""What a drawing can show: emoji names made plain, and the groups that Unicode sorts them into."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from default_model.concepts import Concept, with_article

SUBGROUPS = {
    "face-smiling": "a smiling face", "face-affection": "a loving face",
    "face-tongue": "a face with its tongue out", "face-hand": "a face with a hand",
    "face-neutral-skeptical": "a face", "face-sleepy": "a sleepy face",
    "face-unwell": "an unwell face", "face-concerned": "a worried face",
    "face-negative": "an angry face", "cat-face": "a cat's face", "monkey-face": "a monkey's face",
    "heart": "a heart", "hand-fingers-open": "a hand", "hand-fingers-partial": "a hand",
    "hand-single-finger": "a hand", "hand-fingers-closed": "a hand", "hands": "hands",
    "hand-prop": "a hand", "body-parts": "a part of the body", "person": "a person",
    "person-gesture": "a person", "person-role": "a person",
    "person-fantasy": "a fantasy character", "person-activity": "a person",
    "person-sport": "a person doing sport", "person-resting": "a person resting",
    "family": "a group of people", "animal-mammal": "a mammal", "animal-bird": "a bird",
    "animal-amphibian": "a frog", "animal-reptile": "a reptile",
    "animal-marine": "a sea animal", "animal-bug": "an insect", "plant-flower": "a flower",
    "plant-other": "a plant", "food-fruit": "a fruit", "food-vegetable": "a vegetable",
    "food-prepared": "food", "food-asian": "food", "food-sweet": "something sweet",
    "drink": "a drink", "place-geographic": "a landscape", "place-building": "a building",
    "place-religious": "a place of worship", "place-other": "a place",
    "transport-ground": "a land vehicle", "transport-water": "a boat",
    "transport-air": "an aircraft", "time": "a clock", "sky-weather": "the sky or weather",
    "award-medal": "a medal or trophy", "sport": "sports equipment", "game": "a game",
    "clothing": "clothing", "musical-instrument": "a musical instrument", "phone": "a phone",
    "computer": "computer equipment", "book-paper": "a book or paper", "money": "money",
    "mail": "mail", "writing": "a writing tool", "office": "office equipment", "lock": "a lock",
    "tool": "a tool", "science": "a scientific instrument", "medical": "medical equipment",
    "household": "a household item", "flag": "a flag", "country-flag": "a flag",
    "subdivision-flag": "a flag",
}  # fmt: skip
GROUPS = {
    "smileys-emotion": "a face or a heart", "people-body": "a person or a part of the body",
    "animals-nature": "an animal or plant", "food-drink": "food or drink",
    "symbols": "a symbol", "flags": "a flag",
}  # fmt: skip
UNNAMED_GROUPS = ("symbols", "flags", "component")  # only their group is said
SUBGROUP_WORTH, GROUP_WORTH = 0.6, 0.35
PLURAL = re.compile(r"(?<!s)(?<!u)(?<!i)s$|^(?:two|crossed|clinking|folded|raising) |hands$")
SINGULAR_IN_S = ("glass", "bus", "cactus", "walrus", "octopus", "compass", "dress", "tennis")

# Names that stand without an article, or that are no noun at all and are renamed.
BARE = frozenset(
    """fire; ice; cooked rice; curry rice; spaghetti; sushi; bread; flatbread; butter; salt;
    garlic; broccoli; bacon; popcorn; candy; ice cream; soft ice cream; shaved ice; fog; tea; coral;
    bubble tea; badminton; bowling; camping; tennis; ping pong; field hockey; ice hockey; cooking;
    horse racing; luggage; lettuce; rhinoceros; fondue; wood; soap; sake; nail polish; glasses;
    canned food; construction; custard; hindu temple""".replace("\n    ", " ").split("; ")
)
RENAMED = {
    "ZZZ": "sleep symbol", "breast-feeding": "person feeding baby", "hot springs": "hot spring",
    "pregnant man": "pregnant person", "pregnant woman": "pregnant person",
    "lacrosse": "lacrosse stick", "leafy green": "lettuce", "dna": "DNA strand",
    "money-mouth face": "face with money", "thread": "spool of thread", "yarn": "ball of yarn",
    "cut of meat": "piece of meat", "memo": "memo and pencil", "skis": "pair of skis",
    "hear-no-evil monkey": "monkey with covered ears", "locked": "padlock", "unlocked": "padlock",
    "see-no-evil monkey": "monkey with covered eyes", "mate": "mate drink",
    "speak-no-evil monkey": "monkey with covered mouth", "lotion bottle": "bottle of lotion",
    "man dancing": "person dancing", "woman dancing": "person dancing", "dizzy": "dizzy symbol",
    "busts in silhouette": "group of people", "bust in silhouette": "person",
    "Mx Claus": "Santa Claus", "Mrs. Claus": "Santa Claus", "foggy": "foggy city",
    "high voltage": "lightning bolt", "star-struck": "star-struck face", "collision": "explosion",
    "woman and man holding hands": "people holding hands", "smiling": "smiling face",
    "men holding hands": "people holding hands", "women holding hands": "people holding hands",
    "rolling on the floor laughing": "laughing face", "dashing away": "puff of air",
    "x-ray": "X-ray picture", "t-shirt": "T-shirt", "bald": "bald person",
    "building construction": "construction site", "herb": "sprig of herbs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """What each emoji is called; icon sets know it by a slug of its name, or by code points."""

    slug_of: dict[str, str]  # code points -> slug
    by_slug: dict[str, str]  # slug -> phrase
    concepts: list[Concept]
    num_singles: int  # of the concepts, the first ones are single drawings


def read_names(npm: Path) -> Names:
    """Read `emojibase-data`: phrases for each drawing, then the groups, as concepts."""
    folder = npm / "emojibase-data"
    entries = json.loads((folder / "en" / "data.json").read_text())
    meta = json.loads((folder / "meta" / "groups.json").read_text())
    slug_of, by_slug, groups_of = {}, {}, {}
    for entry in entries:
        if "group" not in entry or meta["groups"][str(entry["group"])] == "component":
            continue
        group = meta["groups"][str(entry["group"])]
        subgroup = meta["subgroups"][str(entry["subgroup"])]
        phrase = GROUPS[group] if group in UNNAMED_GROUPS else plain_phrase(entry["label"])
        slug_of[code_points(entry["hexcode"])] = slug(entry["label"])
        by_slug[slug(entry["label"])] = phrase
        groups_of.setdefault(phrase, (SUBGROUPS.get(subgroup), GROUPS.get(group)))
    return Names(slug_of, by_slug, _concepts(groups_of), len(groups_of))


def _concepts(groups_of: dict[str, tuple[str | None, str | None]]) -> list[Concept]:
    """Return first each single drawing, then the groups; a drawing may be named as its group."""
    phrases = sorted(groups_of)
    members: dict[str, set[int]] = {}
    worths: dict[str, float] = {}
    for index, phrase in enumerate(phrases):
        for group, worth in zip(groups_of[phrase], (SUBGROUP_WORTH, GROUP_WORTH), strict=True):
            if group:
                members.setdefault(group, set()).add(index)
                worths.setdefault(group, worth)
    singles = [
        Concept(phrase, frozenset({index} | members.get(phrase, set())), worths.get(phrase, 1.0))
        for index, phrase in enumerate(phrases)
    ]
    groups = [
        Concept(group, frozenset(indices), worths[group])
        for group, indices in members.items()
        if group not in groups_of
    ]
    return singles + groups


def plain_phrase(label: str) -> str:
    """Make an emoji's name a phrase with its article, and men and women persons."""
    label = label.replace("’", "'").replace("“", "").replace("”", "")
    label = re.sub(r": facing right$", "", label)
    label = RENAMED.get(label, label)
    if label.startswith(("family", "kiss:", "couple with heart")):
        return "a group of people" if label.startswith("family") else "a couple"
    label = re.sub(r"^(?:men|women|people) ", "people ", label)
    label = re.sub(r"^(man|woman|person): (.*)$", r"person with \2", label)
    role = re.sub(r"^(?:man|woman|person|deaf (?:man|woman)|Mx)(?: |$)", "", label)
    if role != label:
        is_doing = bool(re.match(r"\S*ing\b|mountain biking|in |with |$", role))
        label = f"person {role}".strip() if is_doing else role
    label = label.split(":")[0]
    if "o'clock" in label or label.endswith("-thirty"):
        return "a clock"
    head = re.split(r" (?:with|of|holding|in|on|and) ", label)[0]
    is_plural = (
        not head.startswith("person ") and PLURAL.search(head) and not head.endswith(SINGULAR_IN_S)
    )
    is_bare = is_plural or label in BARE or label.startswith("people ")
    return label if is_bare else with_article(label)


def slug(label: str) -> str:
    """Return the name that icon sets make of a label."""
    plain = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain.replace("'", "")).strip("-")


def code_points(name: str) -> str:
    """Return a file name's code points without the marks that only choose a style."""
    return "-".join(part for part in name.lower().split("-") if part != "fe0f")
