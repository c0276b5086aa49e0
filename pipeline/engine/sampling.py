"""From logits to tokens: greedy, or drawn with each row's own random numbers."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.device import upload
from pipeline.engine.said import said_so_far
from pipeline.engine.sequence import Sequence
from pipeline.kernels import decode as kernels

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Draws:
    """What a choice needs beside the logits, a value a row; None where no row needs it.

    `uniforms` float64 `[B]`; `is_short` bool `[B]`, whether the end token is held back; `said`
    int64 `[B, M]`, the captions so far as `Said.every` holds them.
    """

    uniforms: Tensor | None = None
    is_short: Tensor | None = None
    said: Tensor | None = None

    def uploaded(self, place: torch.device) -> Draws:
        """Return the same on a device."""
        if self is NONE:
            return self
        each = (self.uniforms, self.is_short, self.said)
        return Draws(*(None if one is None else upload(one, place) for one in each))


NONE = Draws()  # the network's own best token


class Sampler:
    """Chooses one token a row.

    A drawn token is the inverse of the cumulative distribution at one uniform number of the
    row's own, in float64: no neighbour, slot or batch size takes part in it.
    """

    def __init__(self, settings: SamplingSettings, eos_ids: frozenset[int]) -> None:
        self._settings = settings
        self._eos_ids = sorted(eos_ids)
        self._eos = torch.tensor(self._eos_ids, dtype=torch.int64)
        self._room = torch.empty(0)

    @property
    def draws_numbers(self) -> bool:
        """True if a choice takes a random number."""
        return self._settings.temperature > 0

    @property
    def holds_back(self) -> bool:
        """True if a caption has a least length."""
        return self._settings.min_new_tokens > 0 and bool(self._eos_ids)

    @property
    def num_kept(self) -> int:
        """How many ids of a caption a choice looks at: all of them with a penalty, or none."""
        is_needed = self._settings.repetition_penalty != 1.0
        return self._settings.max_new_tokens if is_needed else 0

    def draws(self, sequences: Rows[Sequence], said: Tensor | None = None) -> Draws:
        """Return what the next choice for these sequences needs; `said` is passed on."""
        uniforms = is_short = None
        if self.draws_numbers:
            numbers = [sequence.uniform() for sequence in sequences]
            uniforms = torch.tensor(numbers, dtype=torch.float64)
        if self.holds_back:
            least = self._settings.min_new_tokens
            short = [sequence.num_chosen < least for sequence in sequences]
            is_short = torch.tensor(short) if any(short) else None
        if uniforms is None and is_short is None and said is None:
            return NONE
        return Draws(uniforms, is_short, said)

    def choose(self, logits: Tensor, sequences: Rows[Sequence]) -> tuple[list[int], list[float]]:
        """Return a token and its log probability for each row of logits `[B, V]`, and wait."""
        said = None
        if self.num_kept:
            said = said_so_far([s.token_ids for s in sequences], self.num_kept)
        draws = self.draws(sequences, said).uploaded(logits.device)
        ids, logprobs = self.select(logits, draws)
        return ids.tolist(), logprobs.tolist()

    def select(
        self, logits: Tensor, draws: Draws, room: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose from logits `[B, V]`: ids, log probabilities `[B]`, on their device.

        The probability is the network's own, before temperature, penalty and filters. It is
        NaN where the logits are not finite. `room`, `[B, V]` of `widened_dtype`, is memory to
        work in; the sampler has its own.
        """
        if draws is NONE:
            fused = kernels.best(logits)
            if fused is not None:
                return fused
        wide = (self._room_for(logits) if room is None else room).copy_(logits)
        shaped = self._shape(wide, draws)
        if draws.uniforms is None:
            ids = best(shaped)
        else:
            ids = draw(
                shaped / self._settings.temperature,
                draws.uniforms,
                top_k=self._settings.top_k,
                top_p=self._settings.top_p,
            )
        is_greedy = draws.uniforms is None and shaped is wide
        return ids, chosen_logprobs_(wide, ids, are_largest=is_greedy)

    def _room_for(self, logits: Tensor) -> Tensor:
        """Return memory for logits in float32 or wider."""
        wide = widened_dtype(logits)
        if self._room.dtype != wide or self._room.device != logits.device:
            self._room = torch.empty(0, dtype=wide, device=logits.device)
        if self._room.numel() < logits.numel():
            # Kept from step to step: new memory of this size is mapped page by page each time.
            self._room = torch.empty(logits.numel(), dtype=wide, device=logits.device)
        return self._room[: logits.numel()].view(logits.shape)

    def _shape(self, logits: Tensor, draws: Draws) -> Tensor:
        if draws.said is not None:
            logits = penalise(logits, draws.said, self._settings.repetition_penalty)
        if draws.is_short is not None:
            if self._eos.device != logits.device:
                self._eos = self._eos.to(logits.device)
            ends = logits.index_select(1, self._eos)
            held = ends.masked_fill(draws.is_short[:, None], float("-inf"))
            logits = logits.index_copy(1, self._eos, held)
        return logits


def widened_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype that choices are made in."""
    return torch.promote_types(logits.dtype, torch.float32)


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


def penalise(logits: Tensor, said: Tensor, penalty: float) -> Tensor:
    """Make tokens that a caption already holds less likely (https://arxiv.org/abs/1909.05858).

    Positive logits `[B, V]` are divided by the penalty, negative ones multiplied. The prompt's
    tokens are left alone: a caption may well use the words of the question. said: `[B, M]`, as
    `Said.every`.
    """
    # What lies behind a caption stands for its first id once more: the same number, put twice.
    first = said[:, :1]
    ids = torch.where(said < 0, first, said).clamp(min=0)
    scores = logits.gather(1, ids)
    lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
    return logits.scatter(1, ids, torch.where(first < 0, scores, lowered))


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
