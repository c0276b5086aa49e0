"""What the vision side reports of a picture: its style, its people, and one concept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models.default.concepts import UNCLEAR, ConceptChooser
from pipeline.models.default.faces import FaceFinder, Faces
from pipeline.models.default.tower import HEAD_WIDTH, NUM_CLASSES, Tower, scale_pixels


class Style(IntEnum):
    """The first image token."""

    PHOTO = 0
    GREY_PHOTO = 1
    DRAWING = 2
    GREY_DRAWING = 3


class People(IntEnum):
    """The second image token: how many, and whether they or the concept are named first."""

    NONE = 0
    ONE = 1
    TWO = 2
    SEVERAL = 3
    ONE_BESIDE = 4
    TWO_BESIDE = 5
    SEVERAL_BESIDE = 6


@dataclass(frozen=True, slots=True)
class SceneSizes:
    """How many concepts there are, and the numbers that were tuned; stored with the weights."""

    num_photo_concepts: int
    num_photo_members: int
    num_drawings: int
    num_drawing_concepts: int
    num_drawing_members: int
    sharpness: float
    drawing_sharpness: float
    cost: float
    least: float
    drawing_least: float
    least_flat: float


SURE_FACE, COUNTED_FACE = 0.97, 0.9
LARGE_FACE = 0.25  # of the tile's side: a portrait
PORTRAIT_LEAST = 0.6  # how likely a concept must be to be named beside a portrait
MOST_ANIMAL, MOST_FACE_LIKE = 0.5, 0.3
GREY_SPREAD, GREY_CONTRAST = 5.0, 8.0
FLAT_STEP = 2  # neighbouring pixels that differ by less are one flat area
PAPER_STEP = 12  # what differs from the border's colour by more is no paper
DRAWING_WIDTH = 384
STANDARD_LENGTH = 30.0  # what standardised features are brought to: far-off styles stay in range
# A drawing must look like one to the gate, be flat within, and be no thing that the classifier is
# sure of: photographs cut out on white paper are flat, but not within.
GATE_UNIT, INSIDE_UNIT, LEAST_DRAWN = 10.0, 0.3, 1.5


class SceneReader(nn.Module):
    """Classifier, drawing head and face networks, and the rules that join them.

    The rules are rows of three whole numbers, so what they report has finitely many captions.
    """

    is_animal: Tensor  # [1000] classes
    is_face_like: Tensor  # [1000]
    is_drawn: Tensor  # [1000], things that are drawings themselves
    is_large: Tensor  # [photo concepts]
    is_person: Tensor  # [photo concepts]
    drawing_mean: Tensor
    drawing_scale: Tensor

    def __init__(self, sizes: SceneSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tower = Tower()
        self.faces = FaceFinder()
        self.photo_concepts = ConceptChooser(
            sizes.num_photo_concepts,
            sizes.num_photo_members,
            sizes.sharpness,
            sizes.cost,
            sizes.least,
        )
        self.drawing_concepts = ConceptChooser(
            sizes.num_drawing_concepts,
            sizes.num_drawing_members,
            sizes.drawing_sharpness,
            sizes.cost,
            sizes.drawing_least,
        )
        self.drawing_basis = nn.Linear(HEAD_WIDTH, DRAWING_WIDTH, bias=False)
        self.drawing_head = nn.Linear(DRAWING_WIDTH, sizes.num_drawings, bias=False)
        self.drawing_gate = nn.Linear(HEAD_WIDTH, 1)
        self.register_buffer("drawing_mean", torch.zeros(HEAD_WIDTH))
        self.register_buffer("drawing_scale", torch.ones(HEAD_WIDTH))
        for name, size in (
            ("is_animal", NUM_CLASSES),
            ("is_face_like", NUM_CLASSES),
            ("is_drawn", NUM_CLASSES),
            ("is_large", sizes.num_photo_concepts),
            ("is_person", sizes.num_photo_concepts),
        ):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, tiles: Tensor) -> Tensor:
        """Report on pictures `[B, 2, 3, S, S]` (uint8): style, people, concept `[B, 3]`."""
        middle = tiles[:, 0]
        dtype = self.tower.stem.weight.dtype
        pixels = scale_pixels(middle).to(dtype).contiguous(memory_format=torch.channels_last)
        pooled, logits = self.tower(pixels)
        chances = self.photo_concepts.probabilities(logits)
        is_drawing = self._is_drawing(pooled, middle, chances)
        styles = is_drawing.long() * 2 + is_grey(middle).long()
        concepts = self.photo_concepts.choose(chances)
        people, concepts = self._people(tiles[:, 1], chances, concepts, is_drawing)
        drawn = self.drawing_concepts.choose(self._drawing_chances(pooled))
        num_photo = self.sizes.num_photo_concepts
        concepts = torch.where(concepts == UNCLEAR, num_photo, concepts)
        drawn = torch.where(drawn == UNCLEAR, self.sizes.num_drawing_concepts, drawn)
        concepts = torch.where(is_drawing, drawn + num_photo + 1, concepts)
        return torch.stack((styles, people, concepts), dim=1)

    def _standardised(self, pooled: Tensor) -> Tensor:
        return standardised(pooled, self.drawing_mean, self.drawing_scale)

    def _drawing_chances(self, pooled: Tensor) -> Tensor:
        whitened = F.normalize(self.drawing_basis(self._standardised(pooled)), dim=1)
        return self.drawing_concepts.probabilities(self.drawing_head(whitened))

    def _is_drawing(self, pooled: Tensor, middle: Tensor, chances: Tensor) -> Tensor:
        gate: Tensor = self.drawing_gate(self._standardised(pooled))[:, 0]
        flat, inside = flat_shares(middle)
        classes = chances[:, :NUM_CLASSES]
        sure = (classes * (1 - self.is_drawn)).amax(dim=1) - classes @ self.is_drawn
        drawn = gate / GATE_UNIT + inside / INSIDE_UNIT - sure
        return (gate > 0) & (flat > self.sizes.least_flat) & (drawn > LEAST_DRAWN)

    def _people(
        self, tiles: Tensor, chances: Tensor, concepts: Tensor, is_drawing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the people token `[B]`, and the concepts left to name beside people `[B]`."""
        classes = chances[:, :NUM_CLASSES]
        may_have = (classes @ self.is_animal < MOST_ANIMAL) & ~is_drawing
        may_have &= classes @ self.is_face_like < MOST_FACE_LIKE
        may_have &= (concepts == UNCLEAR) | (self.is_person[concepts] == 0)
        people, concepts = torch.zeros_like(concepts), concepts.clone()
        rows = may_have.nonzero()[:, 0].tolist()
        for row, faces in zip(rows, self.faces(tiles[may_have]), strict=True):
            count, size = count_people(faces, tiles.shape[-1])
            if not count:
                continue
            concept = int(concepts[row])
            is_portrait = size >= LARGE_FACE
            if is_portrait and chances[row, concept] < PORTRAIT_LEAST:
                concept = UNCLEAR
            is_beside = concept != UNCLEAR and not is_portrait and bool(self.is_large[concept])
            people[row] = min(count, 3) + (3 if is_beside else 0)
            concepts[row] = concept
        return people, concepts


def count_people(faces: Faces, side: int) -> tuple[int, float]:
    """Return how many people the faces show, none unless one is sure, and the largest's height.

    The height is a share of the tile's side.
    """
    if not len(faces.scores) or float(faces.scores.max()) < SURE_FACE:
        return 0, 0.0
    heights = faces.boxes[:, 3] - faces.boxes[:, 1]
    return int((faces.scores >= COUNTED_FACE).sum()), float(heights.max()) / side


def is_grey(middle: Tensor) -> Tensor:
    """Tell black-and-white pictures `[B, 3, S, S]` that show something: bool `[B]`."""
    small = F.avg_pool2d(middle.float(), 4)
    spread = (small.amax(dim=1) - small.amin(dim=1)).flatten(1)
    contrast = small.mean(dim=1).flatten(1).std(dim=1)
    return (spread.quantile(0.98, dim=1) < GREY_SPREAD) & (contrast > GREY_CONTRAST)


def flat_shares(middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of flat pixels in `[B, 3, S, S]`, and within what is no paper: `[B]` each.

    Flat pixels are like the ones before them; paper is what has the colour of the border.
    """
    values = middle.short()
    rest = values[..., 1:, 1:]
    across = (rest - values[..., 1:, :-1]).abs().amax(dim=1)
    down = (rest - values[..., :-1, 1:]).abs().amax(dim=1)
    is_flat = (across <= FLAT_STEP) & (down <= FLAT_STEP)
    edges = (values[..., 0, :], values[..., -1, :], values[..., :, 0], values[..., :, -1])
    paper = torch.cat(edges, dim=-1).median(dim=-1).values[..., None, None]
    is_thing = (rest - paper).abs().amax(dim=1) > PAPER_STEP
    num_thing = is_thing.sum(dim=(1, 2)).clamp(min=1)
    inside = (is_flat & is_thing).sum(dim=(1, 2)) / num_thing
    return is_flat.float().mean(dim=(1, 2)), inside


def standardised(pooled: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Bring pooled features `[B, 1280]` to zero mean, like spread and one length."""
    return F.normalize((pooled - mean) * scale, dim=1) * STANDARD_LENGTH
