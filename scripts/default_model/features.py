"""Run pictures through the tower once, and keep what the heads are fitted on."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from default_model.drawings import Names
from default_model.fetch import Sources
from default_model.pictures import (
    Drawing,
    drawings,
    gate_photos,
    meaningless_pictures,
    on_background,
    test_drawings,
)
from pipeline.models.default.tower import Tower, scale_pixels
from pipeline.processors.default import picture_tiles

BATCH = 8
NUM_GATE_PHOTOS, NUM_MEANINGLESS = 2400, 600


@dataclass(frozen=True, slots=True)
class Features:
    """Pooled features `[K, 1280]` in half precision; of drawings also what and whose they are."""

    pooled: Tensor
    keys: list[str]
    styles: list[str]


def tower_features(tower: Tower, pictures: Iterable[Image.Image]) -> Tensor:
    """Return the pooled features `[K, 1280]` of pictures, as the model sees their middle."""
    kept, batch = [], []
    for picture in pictures:
        batch.append(picture_tiles(picture)[0])
        if len(batch) == BATCH:
            kept.append(_run(tower, batch))
            batch = []
    if batch:
        kept.append(_run(tower, batch))
    return torch.cat(kept)


@torch.inference_mode()
def _run(tower: Tower, tiles: list[Tensor]) -> Tensor:
    pixels = scale_pixels(torch.stack(tiles)).contiguous(memory_format=torch.channels_last)
    pooled, _ = tower(pixels)
    return pooled.half()


def gather(sources: Sources, tower: Tower, names: Names, folder: Path) -> dict[str, Features]:
    """Gather, or read from `folder`, the features of all training and test pictures."""
    chance = random.Random(0)

    def of_drawings(found: Iterable[Drawing]) -> Features:
        listed = list(found)
        pictures = (on_background(drawing.render(), chance) for drawing in listed)
        pooled = tower_features(tower, pictures)
        return Features(pooled, [d.key for d in listed], [d.style for d in listed])

    def of_pictures(pictures: Iterable[Image.Image], style: str) -> Features:
        pooled = tower_features(tower, pictures)
        return Features(pooled, [""] * len(pooled), [style] * len(pooled))

    makers = {
        "photos": lambda: of_pictures(gate_photos(sources, NUM_GATE_PHOTOS), "photo"),
        "meaningless": lambda: of_pictures(meaningless_pictures(NUM_MEANINGLESS), "none"),
        "drawings": lambda: of_drawings(drawings(sources, names)),
        "test-drawings": lambda: of_drawings(test_drawings(sources, names)),
    }
    gathered = {}
    for name, make in makers.items():
        path = folder / f"{name}.pt"
        if not path.exists():
            made = make()
            torch.save((made.pooled, made.keys, made.styles), path)
        gathered[name] = Features(*torch.load(path, weights_only=True))
    return gathered
