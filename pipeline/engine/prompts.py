"""Prompts through the network: images to features, then a left-padded prefill to first tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.cache import KVCache
from pipeline.engine.device import Chosen, Device, upload
from pipeline.engine.padding import left_pad
from pipeline.engine.said import Said, said_so_far
from pipeline.engine.sampling import Sampler
from pipeline.engine.sequence import Sequence
from pipeline.models.vlm import CaptionModel
from pipeline.records import EngineCounters


@dataclass(frozen=True, slots=True)
class Admission:
    """Who takes which slot in a prefill: a sequence a prompt, then further captions of them.

    `rows` says which prompt each sequence goes on from.
    """

    sequences: tuple[Sequence, ...]
    rows: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def of(cls, leads: Rows[Sequence], free_slots: Callable[[int], list[int]]) -> Admission:
        """Bring along the further captions of each prompt."""
        siblings = [(row, each) for row, lead in enumerate(leads) for each in lead.siblings()]
        rows = (*range(len(leads)), *(row for row, _ in siblings))
        sequences = (*leads, *(each for _, each in siblings))
        return cls(sequences, rows, tuple(free_slots(len(sequences))))

    @property
    def leads(self) -> tuple[Sequence, ...]:
        """The first sequence of each prompt."""
        return self.sequences[: 1 + max(self.rows)]


class Prompts:
    """Runs the network on what waits; slots are given and taken by the engine."""

    def __init__(
        self,
        model: CaptionModel,
        cache: KVCache,
        said: Said,
        sampler: Sampler,
        device: Device,
        counters: EngineCounters,
    ) -> None:
        self._model = model
        self._cache = cache
        self._said = said
        self._sampler = sampler
        self._device = device
        self._counters = counters

    def encode(self, batch: Rows[Sequence]) -> list[Sequence]:
        """Run the vision tower; a request whose features do not fit its prompt fails alone.

        Returns those that failed.
        """
        seeing = [s for s in batch if s.request.images is not None]
        images = [s.request.images for s in seeing if s.request.images is not None]
        encoded = self._model.encode_images(images) if images else ()
        for sequence, row in zip(seeing, encoded, strict=True):
            # A copy, since a slice would keep the features of the whole batch as long as its own.
            sequence.keep_features(row.clone())
        failed: list[Sequence] = []
        for sequence in batch:
            wanted = sequence.request.prompt_ids.count(self._model.image_token_id)
            found = 0 if sequence.features is None else sequence.features.shape[0]
            if found != wanted:
                key = sequence.request.ref.key
                detail = f"{wanted} image places in the prompt, {found} image features"
                failed += sequence.fail("placeholder_mismatch", f"key {key!r}: {detail}")
        return failed

    def run(self, admitted: Admission) -> Callable[[], Chosen]:
        """Fill slots with prompts, and choose each sequence's next token: return what reads them.

        The slots of further captions are left as they are, to be copied.
        """
        leads, place = admitted.leads, self._cache.device
        padded = left_pad([lead.prefix_ids for lead in leads], place)
        features = [s.features for s in leads if s.features is not None]
        logits = self._model.next_logits(
            padded.ids,
            torch.cat(features) if features else None,
            padded.positions,
            padded.mask,
            self._cache.prefill_view(admitted.slots[: len(leads)], padded),
        )
        if len(admitted.rows) > len(leads):
            logits = logits.index_select(0, upload(torch.tensor(admitted.rows), place))
        chosen = self._choose(logits, admitted)
        self._counters.prefills += 1
        self._counters.prompt_tokens += sum(padded.lengths)
        self._counters.padding_tokens += padded.num_padding_tokens
        return chosen

    def _choose(self, logits: Tensor, admitted: Admission) -> Callable[[], Chosen]:
        sequences, place = admitted.sequences, self._cache.device
        before = places = None
        if num_kept := self._sampler.num_kept:
            before = said_so_far([s.token_ids for s in sequences], num_kept)
            places = upload(torch.tensor([len(s.token_ids) for s in sequences]), place)
        draws = self._sampler.draws(sequences, before).uploaded(place)
        ids, logprobs = self._sampler.select(logits, draws)
        read = self._device.fetch(ids, logprobs)
        slots = upload(torch.tensor(admitted.slots), place)
        self._said.start(slots, ids, draws.said, places)
        return read
