"""The caption of everything that the vision side can report, and the text to train on.

A report is three numbers, each an image token: style, people, concept. The language model learns
to say each report in words, and to go on from the openings that users prompt with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from default_model.concepts import Concept
from pipeline.models.default.scene import People, Style

PEOPLE_WORDS = {1: "a person", 2: "two people", 3: "several people"}
STYLE_WORDS = {
    Style.PHOTO: "a photo of",
    Style.GREY_PHOTO: "a black-and-white photo of",
    Style.DRAWING: "a drawing of",
    Style.GREY_DRAWING: "a black-and-white drawing of",
}
UNCLEAR_WORDS = "something unclear"
# After these the model goes on with what is there; after the others it starts a caption.
OPENINGS = (
    *STYLE_WORDS.values(), "a picture of", "an image of", "a photograph of", "a painting of",
    "a close-up of", "this is", "this is a photo of", "this is a picture of", "there is",
    "the image shows", "the picture shows", "this image shows", "I see", "I can see", "here is",
    "in this picture there is", "the photo shows", "an illustration of", "look at",
)  # fmt: skip
INSTRUCTIONS = (
    "Describe this image.", "Describe the image.", "Caption:", "Caption this image:",
    "What is in this picture?", "What is this?", "What do you see?", "Describe the photo briefly.",
    "Write a caption.", "Image caption:", "Can you describe this picture?", "Describe:",
    "What does the image show?", "Please describe the image in detail.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What the vision side says of one picture; `concept` counts photo concepts, then drawings."""

    style: int
    people: int
    concept: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The concepts of photographs and of drawings; after the last of each comes "unclear"."""

    photo: list[Concept]
    drawing: list[Concept]

    @property
    def num_concepts(self) -> int:
        """How many rows the concept table has."""
        return len(self.photo) + len(self.drawing) + 2

    def reports(self) -> Iterator[Report]:
        """Go through every report that can occur."""
        num_photo = len(self.photo) + 1
        for concept in range(num_photo):
            for style in (Style.PHOTO, Style.GREY_PHOTO):
                for people in People:
                    yield Report(style, people, concept)
        for concept in range(num_photo, self.num_concepts):
            for style in (Style.DRAWING, Style.GREY_DRAWING):
                yield Report(style, People.NONE, concept)

    def phrase(self, report: Report) -> str:
        """Return what is there, without the words for the style."""
        num_photo = len(self.photo) + 1
        if report.concept >= num_photo:
            index = report.concept - num_photo
            return self.drawing[index].phrase if index < len(self.drawing) else UNCLEAR_WORDS
        count = (report.people - 1) % 3 + 1 if report.people else 0
        if report.concept == len(self.photo):
            return PEOPLE_WORDS[count] if count else UNCLEAR_WORDS
        concept = self.photo[report.concept]
        if not count:
            return concept.phrase
        if concept.is_worn:
            return f"{PEOPLE_WORDS[count]} in {concept.phrase}"
        if report.people >= People.ONE_BESIDE:
            return f"{concept.phrase} with {PEOPLE_WORDS[count]}"
        return f"{PEOPLE_WORDS[count]} with {concept.phrase}"

    def caption(self, report: Report) -> str:
        """Return the whole caption."""
        return f"{STYLE_WORDS[Style(report.style)]} {self.phrase(report)}"


def prompted(vocabulary: Vocabulary, report: Report, chance: random.Random) -> tuple[str, str]:
    """Draw a prompt and what should follow it; mostly there is no prompt."""
    kind = chance.random()
    if kind < 0.7:
        return "", vocabulary.caption(report)
    if kind < 0.88:
        opening = chance.choice(OPENINGS)
        opening = opening[0].upper() + opening[1:] if chance.random() < 0.3 else opening
        return opening, f" {vocabulary.phrase(report)}"
    instruction = chance.choice(INSTRUCTIONS)
    instruction = instruction.lower() if chance.random() < 0.3 else instruction
    return instruction, f" {vocabulary.caption(report)}"
