"""Train the language model to say every report in words."""

from __future__ import annotations

import copy
import math
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from default_model.captions import Report, Vocabulary, prompted
from default_model.speak import misspoken
from pipeline.models.default import storage
from pipeline.models.default.model import DefaultModel
from pipeline.models.default.scene import People, Style
from pipeline.processors.bpe import BytePairTokenizer

BATCH, STEPS = 96, 1600
PEAK_RATE, LEAST_RATE, WARM_STEPS = 3e-3, 3e-5, 100
MOST_DRILLS, DRILL_STEPS, DRILL_RATE = 12, 60, 1.5e-4
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
    optimiser = _optimiser(model, PEAK_RATE)
    started, mean_loss = time.monotonic(), 0.0
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = _rate(step)
        reports = [_draw(vocabulary, chance) for _ in range(BATCH)]
        pairs = [prompted(vocabulary, report, chance) for report in reports]
        loss = _step(model, optimiser, reports, pairs, tokenizer)
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 100 == 99:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{STEPS} loss {mean_loss:.4f} {seconds:.0f} s", flush=True)


def drill(
    model: DefaultModel, vocabulary: Vocabulary, tokenizer: BytePairTokenizer, seed: int = 1
) -> None:
    """Repeat what is misspelt, as the model will be stored, until nothing is.

    Each round goes through all reports of every concept that was ever misspelt, at a rate that
    falls to zero: at a steady one a round mends some and breaks others.
    """
    chance, optimiser = random.Random(seed), _optimiser(model, DRILL_RATE)
    everything, hard = list(vocabulary.reports()), set[int]()
    for round_ in range(MOST_DRILLS):
        stored = copy.deepcopy(model)
        stored.load_state_dict(storage.unpack(storage.pack(model.state_dict())))
        wrong = misspoken(stored, tokenizer, vocabulary)
        print(f"drill {round_}: {len(wrong)} misspelt", flush=True)
        if not wrong:
            return
        hard |= {report.concept for report in wrong}
        repeated = [report for report in everything if report.concept in hard]
        for step in range(DRILL_STEPS):
            for group in optimiser.param_groups:
                group["lr"] = DRILL_RATE * (1 - step / DRILL_STEPS)
            drawn = [_draw(vocabulary, chance) for _ in range(BATCH // 2)]
            again = [chance.choice(repeated) for _ in range(BATCH // 2)]
            pairs = [prompted(vocabulary, report, chance) for report in drawn]
            pairs += [("", vocabulary.caption(report)) for report in again]
            _step(model, optimiser, drawn + again, pairs, tokenizer)


def _optimiser(model: DefaultModel, rate: float) -> torch.optim.Optimizer:
    trained = [p for name, p in model.named_parameters() if not name.startswith("scene.")]
    return torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


def _step(
    model: DefaultModel,
    optimiser: torch.optim.Optimizer,
    reports: list[Report],
    pairs: list[tuple[str, str]],
    tokenizer: BytePairTokenizer,
) -> Tensor:
    loss = _loss(model, reports, *_token_rows(pairs, tokenizer))
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], 1.0)
    optimiser.step()
    return loss


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
