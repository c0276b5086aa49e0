"""A decode step on a processor: as small as the live sequences allow, made anew each time."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from pipeline.engine.cache import KVCache
from pipeline.engine.device import upload
from pipeline.engine.said import Said
from pipeline.engine.sampling import Sampler
from pipeline.engine.sequence import Sequence
from pipeline.models.vlm import CaptionModel

ROW_BLOCK = 8


class Decoder(Protocol):
    """Runs one token of each live sequence; its keys and values go into the sequence's slot."""

    def step(self, live: Rows[Sequence], max_rows: int) -> tuple[Tensor, Tensor]:
        """Return ids and log probabilities `[B]` for the first slots; `Said` knows the ids.

        At most `max_rows` rows run, which the live ones are no more than.
        """
        ...

    def give_up_memory(self) -> bool:
        """Free what only saves time; False if there was nothing."""
        ...


class EagerDecoder:
    """Calls the network on as many rows and columns as there are."""

    def __init__(self, model: CaptionModel, cache: KVCache, said: Said, sampler: Sampler) -> None:
        self._model = model
        self._cache = cache
        self._said = said
        self._sampler = sampler

    def step(self, live: Rows[Sequence], max_rows: int) -> tuple[Tensor, Tensor]:
        """Run a step as `Decoder` says."""
        # Rows beyond the live ones write into free slots, and nobody reads their logits.
        num_rows = min(rounded_rows(len(live)), max_rows)
        view = self._cache.decode_view(num_rows)
        ids = self._said.last[:num_rows, None]
        logits = self._model.next_logits(ids, None, view.positions, view.mask, view)
        said = None if self._said.every is None else self._said.every[: len(live)]
        draws = self._sampler.draws(live, said).uploaded(self._cache.device)
        chosen, logprobs = self._sampler.select(logits[: len(live)], draws)
        if said is None:
            self._said.go_on(chosen, None)
        else:
            self._said.go_on(chosen, upload(places_of(live, said.shape[1]), self._cache.device))
        return chosen, logprobs

    def give_up_memory(self) -> bool:
        """Say that there is nothing."""
        return False


def places_of(live: Rows[Sequence], num_kept: int) -> Tensor:
    """Return where in its caption each sequence's next token stands, `[B]`, on the host.

    A sequence at its end, which the host has not read yet, stays at its last place.
    """
    return torch.tensor([min(sequence.num_chosen, num_kept - 1) for sequence in live])


def rounded_rows(num_rows: int) -> int:
    """Return how many rows a decode step runs for so many live ones: a power of 2, or eights.

    Each new shape costs kernels that are compiled, and kept.
    """
    if num_rows >= ROW_BLOCK:
        return -(-num_rows // ROW_BLOCK) * ROW_BLOCK
    return 1 << (num_rows - 1).bit_length()
