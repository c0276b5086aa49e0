"""Print what the card says of the finished model: sizes, speed, scores, and what it says."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from default_model.captions import Vocabulary
from default_model.drawings import Names
from default_model.evaluate import captions, mean_seconds, open_picture, score_folder
from default_model.fetch import Sources
from default_model.pictures import on_background, photo_paths, test_drawings
from default_model.speak import misspoken
from default_model.stamps import score_stamps
from pipeline.models.default.model import FOLDER, WEIGHTS, DefaultModel, load_default
from pipeline.models.default.scene import Style
from pipeline.processors.default import DefaultProcessor

SHOWN = (
    "skimage/data",
    "sklearn/datasets/images",
    "matplotlib/mpl-data/sample_data",
)


def report(sources: Sources, names: Names, vocabulary: Vocabulary, photos: Path | None) -> None:
    """Print all scores of the model in the package."""
    model, processor = load_default(), DefaultProcessor()
    size = sum((FOLDER / name).stat().st_size for name in (WEIGHTS, "tokenizer.json"))
    print(f"weights and tokenizer: {size / 1e6:.2f} MB")
    wrong = misspoken(model, processor.tokenizer, vocabulary)
    print(f"reports misspoken: {len(wrong)} of {sum(1 for _ in vocabulary.reports())}")
    for bad in wrong[:10]:
        print(f"  {vocabulary.caption(bad)}")
    shown = [path for place in SHOWN for path in photo_paths(sources.python / place)]
    shown += photo_paths(sources.debian / "usr/share/doc/opencv-doc/examples/data")
    said = captions(model, processor, [open_picture(path) for path in shown])
    for path, (_, text) in zip(shown, said, strict=True):
        print(f"  {path.name}: {text}")
    _score_drawings(model, sources, names, vocabulary)
    print("photographic stamps:", dict(score_stamps(model, sources, vocabulary)))
    if photos is not None:
        print(
            "photographs named by class:",
            dict(score_folder(model, vocabulary, photos, sources.python)),
        )
    seconds = mean_seconds(model, processor, open_picture(shown[0]))
    print(f"vision, batch of 8: {1 / seconds:.1f} images/s on these threads")


def _score_drawings(
    model: DefaultModel, sources: Sources, names: Names, vocabulary: Vocabulary
) -> None:
    """Score drawings by an artist whose work is in no training set."""
    chance = random.Random(1)
    drawn = [d for d in test_drawings(sources, names) if names.by_slug[d.key] != "a flag"][::4]
    said = captions(model, DefaultProcessor(), [on_background(d.render(), chance) for d in drawn])
    num_photo = len(vocabulary.photo) + 1
    counts: Counter[str] = Counter()
    for drawing, (found, _) in zip(drawn, said, strict=True):
        if found.style in (Style.PHOTO, Style.GREY_PHOTO):
            counts["called a photo"] += 1
            continue
        concept = found.concept - num_photo
        if concept == len(vocabulary.drawing):
            counts["unclear"] += 1
            continue
        phrase = names.by_slug[drawing.key]
        single = next(i for i, c in enumerate(vocabulary.drawing) if c.phrase == phrase)
        is_true = single in vocabulary.drawing[concept].classes
        kind = "exact" if concept == single else "group"
        counts[kind if is_true else "wrong"] += 1
    total = sum(counts.values())
    print(
        "drawings of an unseen artist:", {k: f"{v / total:.1%}" for k, v in counts.items()}, total
    )
