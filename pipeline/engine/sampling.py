"""From logits to tokens: greedy, or drawn with each row's own random numbers."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.sequence import Sequence
from pipeline.kernels import decode as kernels

BLOCK = 128


class Sampler:
    """Chooses one token a row.

    A drawn token is the inverse of the cumulative distribution at one uniform number of the
    row's own, in float64: no neighbour, slot or batch size takes part in it.
    """

    def __init__(self, settings: SamplingSettings, eos_ids: frozenset[int]) -> None:
        self._settings = settings
        self._eos_ids = sorted(eos_ids)
        self._room = torch.empty(0)

    def choose(self, logits: Tensor, sequences: Rows[Sequence]) -> tuple[list[int], list[float]]:
        """Return a token and its log probability for each row of logits `[B, V]`.

        The probability is the network's own, before temperature, penalty and filters. It is
        NaN where the logits are not finite.
        """
        if self._is_plain(sequences):
            fused = kernels.best(logits)
            if fused is not None:
                return fused[0].tolist(), fused[1].tolist()
        logits = self._widened(logits)
        shaped = self._shape(logits, sequences)
        if self._settings.temperature == 0:
            ids = best(shaped)
        else:
            uniforms = [sequence.uniform() for sequence in sequences]
            ids = draw(
                shaped / self._settings.temperature,
                torch.tensor(uniforms, dtype=torch.float64, device=logits.device),
                top_k=self._settings.top_k,
                top_p=self._settings.top_p,
            )
        is_greedy = self._settings.temperature == 0 and shaped is logits
        logprobs = chosen_logprobs_(logits, ids, are_largest=is_greedy)
        return ids.tolist(), logprobs.tolist()

    def _is_plain(self, sequences: Rows[Sequence]) -> bool:
        """True if the network's own best token is the answer."""
        settings = self._settings
        is_greedy = settings.temperature == 0 and settings.repetition_penalty == 1.0
        return is_greedy and not any(self._are_too_short(sequences))

    def _are_too_short(self, sequences: Rows[Sequence]) -> list[bool]:
        """Say of each caption whether it may not end yet."""
        if not self._eos_ids:
            return [False] * len(sequences)
        return [len(s.token_ids) < self._settings.min_new_tokens for s in sequences]

    def _widened(self, logits: Tensor) -> Tensor:
        """Return logits in float32 or wider, in memory that may be written over."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self._room.dtype != wide or self._room.device != logits.device:
            self._room = torch.empty(0, dtype=wide, device=logits.device)
        if self._room.numel() < logits.numel():
            # Kept from step to step: new memory of this size is mapped page by page each time.
            self._room = torch.empty(logits.numel(), dtype=wide, device=logits.device)
        return self._room[: logits.numel()].view(logits.shape).copy_(logits)

    def _shape(self, logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
        settings = self._settings
        if settings.repetition_penalty != 1.0:
            logits = penalise(logits, [s.token_ids for s in sequences], settings.repetition_penalty)
        too_short = self._are_too_short(sequences)
        if any(too_short):
            logits = logits.clone()
            rows = torch.tensor(too_short, device=logits.device).nonzero()
            logits[rows, torch.tensor(self._eos_ids, device=logits.device)] = float("-inf")
        return logits


def best(logits: Tensor) -> Tensor:
    """Return the first of the largest logits `[B, V]` of each row: `[B]`.

    In blocks of the vocabulary: a maximum alone is found several times as fast as its place.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % BLOCK:
        return logits.argmax(dim=-1)
    blocks = logits.view(num_rows, vocab_size // BLOCK, BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    place = blocks[torch.arange(num_rows, device=logits.device), block].argmax(dim=-1)
    return block * BLOCK + place


def chosen_logprobs_(logits: Tensor, ids: Tensor, *, are_largest: bool = False) -> Tensor:
    """Return the log probability of one id in each row of logits `[B, V]`, written over here."""
    chosen = logits.gather(1, ids[:, None])
    largest = chosen if are_largest else logits.amax(dim=-1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(dim=-1)
    return (chosen - largest)[:, 0] - total.log()


def penalise(logits: Tensor, token_ids: Rows[Rows[int]], penalty: float) -> Tensor:
    """Make tokens that a caption already holds less likely (https://arxiv.org/abs/1909.05858).

    Positive logits `[B, V]` are divided by the penalty, negative ones multiplied. The prompt's
    tokens are left alone: a caption may well use the words of the question.
    """
    logits = logits.clone()
    for row, ids in enumerate(token_ids):
        if ids:
            seen = torch.tensor(sorted(set(ids)), device=logits.device)
            scores = logits[row, seen]
            logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return logits


def draw(logits: Tensor, uniforms: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Draw one id a row from logits `[B, V]` at uniform numbers `[B]`; returns `[B]`.

    `top_k` keeps the k best; then `top_p` keeps the fewest best tokens whose probabilities
    add up to it, the one that crosses it included (https://arxiv.org/abs/1904.09751).
    """
    scores = logits.double()
    if top_k == 0 and top_p == 1.0:
        ids = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    elif top_k:
        scores, ids = scores.topk(min(top_k, scores.shape[1]), dim=-1)
    else:
        scores, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = scores.softmax(dim=-1)
    if top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= targets).sum(dim=-1, keepdim=True)
    # Rounding may carry a target past the last kept token; the last one it is then.
    last_kept = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return ids.gather(1, torch.minimum(chosen, last_kept))[:, 0]
