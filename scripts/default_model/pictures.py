"""The pictures that the drawing head and the photo gate learn from, made ready for the tower."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from default_model.drawings import Names, code_points
from default_model.fetch import Sources

SIZE = 288
ICON_SETS = ("noto", "fluent-emoji-flat", "fxemoji", "emojione")
# The gate's photographs; astronaut, camera, moon, motorcycle and others are left for the tests.
GATE_PHOTOS = (
    "skimage/data/brick.png", "skimage/data/grass.png", "skimage/data/gravel.png",
    "skimage/data/coins.png", "skimage/data/coffee.png", "skimage/data/rocket.jpg",
    "skimage/data/hubble_deep_field.jpg", "skimage/data/chelsea.png",
    "skimage/data/retina.jpg", "skimage/data/ihc.png",
    "sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawing:
    """One drawing: its style (the artist's set), its emoji's slug, and how to get its picture."""

    style: str
    key: str
    render: Callable[[], Image.Image]


def drawings(sources: Sources, names: Names) -> Iterator[Drawing]:
    """Go through the training drawings of all six sets."""
    for style in ICON_SETS:
        stored = json.loads((sources.npm / "@iconify-json" / style / "icons.json").read_text())
        for slug, icon in stored["icons"].items():
            if slug in names.by_slug:
                svg = _icon_svg(icon, stored)
                yield Drawing(style, slug, lambda svg=svg: _render(sources, svg))
    for path in sorted((sources.npm / "@twemoji" / "svg").glob("*.svg")):
        if slug := names.slug_of.get(code_points(path.stem)):
            yield Drawing("twemoji", slug, lambda path=path: _render(sources, path.read_text()))
    for path in sorted((sources.npm / "@lobehub/fluent-emoji-3d/assets").glob("*.webp")):
        if slug := names.slug_of.get(code_points(path.stem)):
            yield Drawing("fluent-3d", slug, lambda path=path: Image.open(path).convert("RGBA"))


def test_drawings(sources: Sources, names: Names) -> Iterator[Drawing]:
    """Go through drawings of a style that is in no training set."""
    for path in sorted((sources.npm / "openmoji" / "color" / "svg").glob("*.svg")):
        if slug := names.slug_of.get(code_points(path.stem)):
            yield Drawing("openmoji", slug, lambda path=path: _render(sources, path.read_text()))


def _icon_svg(icon: dict[str, object], stored: dict[str, object]) -> str:
    width = icon.get("width", stored.get("width", 16))
    height = icon.get("height", stored.get("height", width))
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}" width="{width}" height="{height}">{icon["body"]}</svg>'
    )


def _render(sources: Sources, svg: str) -> Image.Image:
    if str(sources.python) not in sys.path:
        sys.path.append(str(sources.python))
    import pyvips

    plain = pyvips.Image.svgload_buffer(svg.encode())
    scale = SIZE / max(plain.width, plain.height)
    drawn = pyvips.Image.svgload_buffer(svg.encode(), scale=scale)
    return Image.open(io.BytesIO(drawn.pngsave_buffer())).convert("RGBA")


def on_background(drawn: Image.Image, chance: random.Random) -> Image.Image:
    """Put a drawing on paper: mostly white, sometimes a flat colour, somewhat off the middle."""
    colour = (255, 255, 255)
    if chance.random() < 0.3:
        colour = tuple(chance.randrange(256) for _ in range(3))
    side = int(max(drawn.size) * chance.uniform(1.12, 1.6))
    paper = Image.new("RGBA", (side, side), (*colour, 255))
    free = (side - drawn.width, side - drawn.height)
    place = [int(room * chance.uniform(0.35, 0.65)) for room in free]
    paper.alpha_composite(drawn, (place[0], place[1]))
    picture = paper.convert("RGB")
    return picture.convert("L").convert("RGB") if chance.random() < 0.15 else picture


def gate_photos(sources: Sources, count: int, seed: int = 0) -> Iterator[Image.Image]:
    """Cut crops of photographs, whole and as cut-outs on plain paper."""
    chance = random.Random(seed)
    photos = [Image.open(sources.python / name).convert("RGB") for name in GATE_PHOTOS]
    for _ in range(count):
        photo = chance.choice(photos)
        side = int(min(photo.size) * chance.uniform(0.25, 1.0))
        left = chance.randint(0, photo.width - side)
        top = chance.randint(0, photo.height - side)
        crop = photo.crop((left, top, left + side, top + side)).resize((SIZE, SIZE))
        if chance.random() < 0.2:
            crop = crop.convert("L").convert("RGB")
        yield _cut_out(crop, chance) if chance.random() < 0.35 else crop


def _cut_out(crop: Image.Image, chance: random.Random) -> Image.Image:
    """Keep a random round shape of a crop, on white or another plain colour."""
    mask = Image.new("L", crop.size)
    draw = ImageDraw.Draw(mask)
    for _ in range(chance.randint(1, 4)):
        left, top = (chance.randint(0, SIZE // 2) for _ in range(2))
        width, height = (chance.randint(SIZE // 5, SIZE // 2) for _ in range(2))
        draw.ellipse((left, top, left + width, top + height), fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(1))
    shade = 255 if chance.random() < 0.7 else chance.randrange(256)
    return Image.composite(crop, Image.new("RGB", crop.size, (shade, shade, shade)), mask)


def meaningless_pictures(count: int, seed: int = 0) -> Iterator[Image.Image]:
    """Make noise, gradients, stripes and plain areas, of which nothing can be said."""
    chance = np.random.default_rng(seed)
    for index in range(count):
        kind = index % 5
        grid = int(chance.integers(2, 64)) if kind in (0, 1) else 2
        noise = chance.integers(0, 256, (grid, grid, 3), dtype=np.uint8)
        filtering = Image.Resampling.NEAREST if kind == 0 else Image.Resampling.BICUBIC
        picture = Image.fromarray(noise).resize((SIZE, SIZE), filtering)
        if kind == 2:
            picture = Image.fromarray(chance.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))
        elif kind == 3:
            stripes = (np.arange(SIZE) // chance.integers(2, 40) % 2 * 255).astype(np.uint8)
            picture = Image.fromarray(np.tile(stripes, (SIZE, 1))).convert("RGB")
        elif kind == 4:
            colour = tuple(int(value) for value in chance.integers(0, 256, 3))
            picture = Image.new("RGB", (SIZE, SIZE), colour)
        yield picture.rotate(90) if chance.random() < 0.5 else picture


def photo_paths(folder: Path) -> list[Path]:
    """Return the pictures under a folder, in order."""
    kinds = (".jpg", ".jpeg", ".png", ".webp")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in kinds)
