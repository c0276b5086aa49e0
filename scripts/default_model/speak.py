"""Let the language model speak: greedily, and checked against what it was taught, all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from default_model.captions import Report, Vocabulary
from pipeline.models.default.model import DefaultModel
from pipeline.processors.bpe import BytePairTokenizer

MOST_TOKENS, BATCH = 32, 256


def _last_logits(model: DefaultModel, tokens: Tensor, first: int) -> Tensor:
    batch, length, _ = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
    return model.decoder.logits(model.decoder(tokens, positions, mask)[:, first:])


def _numbers(reports: Sequence[Report]) -> Tensor:
    return torch.tensor([(r.style, r.people, r.concept) for r in reports])


@torch.inference_mode()
def speak(
    model: DefaultModel, tokenizer: BytePairTokenizer, reports: Sequence[Report], prompt: str = ""
) -> list[str]:
    """Return the greedy caption of each report."""
    ids = torch.tensor(tokenizer.encode(prompt), dtype=torch.long)
    ids = ids.expand(len(reports), len(ids))
    image, eos = model.image_tokens(_numbers(reports)), tokenizer.specials["<eos>"]
    is_done = torch.zeros(len(reports), dtype=torch.bool)
    for _ in range(MOST_TOKENS):
        tokens = torch.cat((image, model.decoder.embed(ids)), dim=1)
        best = _last_logits(model, tokens, -1)[:, 0].argmax(dim=1)
        ids = torch.cat((ids, best.masked_fill(is_done, eos)[:, None]), dim=1)
        is_done |= best == eos
        if is_done.all():
            break
    return [tokenizer.decode(row).strip() for row in ids.tolist()]


@torch.inference_mode()
def misspoken(
    model: DefaultModel, tokenizer: BytePairTokenizer, vocabulary: Vocabulary
) -> list[Report]:
    """Return the reports whose greedy caption is not the one taught, among all there are."""
    wrong, waiting = [], list(vocabulary.reports())
    waiting.sort(key=lambda report: len(vocabulary.caption(report)))
    for start in range(0, len(waiting), BATCH):
        reports = waiting[start : start + BATCH]
        rows = [
            [*tokenizer.encode(vocabulary.caption(report)), tokenizer.specials["<eos>"]]
            for report in reports
        ]
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        image = model.image_tokens(_numbers(reports))
        tokens = torch.cat((image, model.decoder.embed(ids[:, :-1])), dim=1)
        said = _last_logits(model, tokens, model.num_image_tokens - 1).argmax(dim=2)
        for report, row, best in zip(reports, rows, said.tolist(), strict=True):
            if best[: len(row)] != row:
                wrong.append(report)
    return wrong
