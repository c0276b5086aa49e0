"""Draw the README's picture: example photographs with the captions of an output folder.

scripts/demo && scripts/make-readme-picture captions scripts/examples/captions.png
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from pipeline.errors import SampleError
from pipeline.images.opening import ImageSettings, open_sample
from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from pipeline.records import Sample

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = (
    *("astronaut.jpg", "panda.jpg", "coffee.png", "cameraman.png"),
    *("crocodile.webp", "louvre.jpg", "screwdriver.jpg", "cut-off.jpg"),
)
COLUMNS, TILE, TEXT, GAP = 4, 220, 54, 12
INK, PALE, PAPER, ROOM = "#1d2733", "#8a94a0", "#ffffff", "#e9edf1"


def main(out: Path, picture: Path) -> None:
    """Read the captions of `out` and write a PNG."""
    texts = captions(out)
    samples = {
        sample.ref.member: sample
        for shard in expand_shards([str(ROOT / "scripts" / "examples" / "*.tar")])
        for sample in read_shard(shard)
    }
    rows = -(-len(MEMBERS) // COLUMNS)
    size = (COLUMNS * (TILE + GAP) + GAP, rows * (TILE + TEXT + GAP) + GAP)
    sheet = Image.new("RGB", size, PAPER)
    for place, member in enumerate(MEMBERS):
        x = GAP + (place % COLUMNS) * (TILE + GAP)
        y = GAP + (place // COLUMNS) * (TILE + TEXT + GAP)
        draw(sheet, samples[member], texts[member], x, y)
    sheet.quantize(255).save(picture, optimize=True)


def captions(out: Path) -> dict[str, tuple[str, bool]]:
    """Return each member's caption, or its error, and whether it is one."""
    names = ["member", "caption", "error"]
    rows = [
        r
        for p in sorted(out.glob("*.parquet"))
        for r in pq.read_table(p, columns=names).to_pylist()
    ]
    return {
        row["member"]: (row["caption"] or f"error: {row['error']}", row["error"] is None)
        for row in rows
    }


def draw(sheet: Image.Image, sample: Sample, text: tuple[str, bool], x: int, y: int) -> None:
    """Draw one picture and the text below it."""
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    pen.rectangle((x, y, x + TILE - 1, y + TILE - 1), fill=ROOM)
    try:
        image, _ = open_sample(sample, ImageSettings())
        image.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)
        sheet.paste(image, (x + (TILE - image.width) // 2, y + (TILE - image.height) // 2))
    except SampleError:
        pen.text((x + TILE // 2, y + TILE // 2), sample.ref.member, PALE, font, anchor="mm")
    caption, is_good = text
    for line, words in enumerate(textwrap.wrap(caption, 29)[:2]):
        pen.text((x, y + TILE + 6 + 20 * line), words, INK if is_good else PALE, font)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
