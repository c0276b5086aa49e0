"""Train the language model to say every report in words."""

from __future__ import annotations

import math
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from default_model.captions import Report, Vocabulary, prompted
from pipeline.models.default.model import DefaultModel
from pipeline.models.default.scene import People, Style
from pipeline.processors.bpe import BytePairTokenizer

BATCH, STEPS = 96, 1600
PEAK_RATE, LEAST_RATE, WARM_STEPS = 3e-3, 3e-5, 100
PHOTO_SHARE = 0.6
IGNORED = -100


def start_tables(model: DefaultModel, vocabulary: Vocabulary, tokenizer: BytePairTokenizer) -> None:
    """Start each concept's image token as the mean of its words' embeddings: it learns sooner."""
    embedding = model.decoder.embedding.weight
    num_photo = len(vocabulary.photo) + 1
    with torch.no_grad():
        nn.init.normal_(embedding, std=0.05)
        for concept in range(vocabulary.num_concepts):
            style = Style.PHOTO if concept < num_photo else Style.DRAWING
            words = f" {vocabulary.phrase(Report(style, People.NONE, concept))}"
            ids = torch.tensor(tokenizer.encode(words))
            model.concept_tokens.weight[concept] = 4 * embedding[ids].mean(dim=0)


def train(
    model: DefaultModel, vocabulary: Vocabulary, tokenizer: BytePairTokenizer, seed: int = 0
) -> None:
    """Train decoder and image token tables in place."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    start_tables(model, vocabulary, tokenizer)
    trained = [p for name, p in model.named_parameters() if not name.startswith("scene.")]
    optimiser = torch.optim.AdamW(trained, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started, mean_loss = time.monotonic(), 0.0
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = _rate(step)
        reports = [_draw(vocabulary, chance) for _ in range(BATCH)]
        pairs = [prompted(vocabulary, report, chance) for report in reports]
        loss = _loss(model, reports, *_token_rows(pairs, tokenizer))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 100 == 99:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{STEPS} loss {mean_loss:.4f} {seconds:.0f} s", flush=True)


def _rate(step: int) -> float:
    if step < WARM_STEPS:
        return PEAK_RATE * (step + 1) / WARM_STEPS
    share = (step - WARM_STEPS) / (STEPS - WARM_STEPS)
    return LEAST_RATE + (PEAK_RATE - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def _draw(vocabulary: Vocabulary, chance: random.Random) -> Report:
    num_photo = len(vocabulary.photo) + 1
    is_grey = chance.random() < 0.3
    if chance.random() < PHOTO_SHARE:
        people = chance.choice(list(People)) if chance.random() < 0.5 else People.NONE
        return Report(Style.PHOTO + is_grey, people, chance.randrange(num_photo))
    concept = chance.randrange(num_photo, vocabulary.num_concepts)
    return Report(Style.DRAWING + is_grey, People.NONE, concept)


def _token_rows(
    pairs: list[tuple[str, str]], tokenizer: BytePairTokenizer
) -> tuple[Tensor, Tensor]:
    """Return ids and targets `[B, T]`; only what follows the prompt is a target."""
    pad, eos = tokenizer.specials["<pad>"], tokenizer.specials["<eos>"]
    rows = []
    for prompt, answer in pairs:
        asked, said = tokenizer.encode(prompt), [*tokenizer.encode(answer), eos]
        rows.append((asked + said, [IGNORED] * len(asked) + said))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (length - len(row)) for row, _ in rows])
    targets = torch.tensor([row + [IGNORED] * (length - len(row)) for _, row in rows])
    return ids, targets


def _loss(model: DefaultModel, reports: list[Report], ids: Tensor, targets: Tensor) -> Tensor:
    numbers = torch.tensor([(r.style, r.people, r.concept) for r in reports])
    # The last image token predicts the first word, so the last word needs no input.
    tokens = torch.cat((model.image_tokens(numbers), model.decoder.embed(ids[:, :-1])), dim=1)
    batch, length, _ = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
    hidden = model.decoder(tokens, positions, mask)[:, model.num_image_tokens - 1 :]
    is_target = targets != IGNORED
    return F.cross_entropy(model.decoder.logits(hidden[is_target]), targets[is_target])
