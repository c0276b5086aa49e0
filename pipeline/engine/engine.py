"""The engine: requests in, finished sequences out, one step at a time.

A step has three beats. *Schedule*: if enough slots are free, the oldest waiting requests run
through the network together (vision, then a left-padded prefill) and take slots. *Run*: every
live sequence gets one token. *Settle*: each that ended frees its slot at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.cache import KVCache
from pipeline.engine.padding import left_pad
from pipeline.engine.sampling import Sampler
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence, row_random
from pipeline.engine.stopping import StopRules
from pipeline.errors import SampleError
from pipeline.models.vlm import CaptionModel
from pipeline.records import EngineCounters, Request


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the cache is built from: slots, the longest prompt, dtype and device."""

    num_slots: int
    prefill_batch: int
    max_prompt_tokens: int
    dtype: torch.dtype
    device: torch.device


class Engine:
    """Owns the loop; `Scheduler` owns slots, `KVCache` owns tensors, `Sequence` its own life."""

    def __init__(
        self,
        model: CaptionModel,
        shape: EngineShape,
        sampling: SamplingSettings,
        rules: StopRules,
        counters: EngineCounters | None = None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._sampling = sampling
        self._rules = rules
        self._sampler = Sampler(sampling, rules.eos_ids)
        self._scheduler = Scheduler(shape.num_slots, shape.prefill_batch, sampling.num_captions)
        self._cache = KVCache(
            model.spec,
            shape.num_slots,
            # The last token of a caption is never fed back, so its keys need no column.
            shape.max_prompt_tokens + rules.max_new_tokens - 1,
            shape.dtype,
            shape.device,
        )
        self.counters = counters or EngineCounters()

    @property
    def num_wanted(self) -> int:
        """How many further requests should be submitted now."""
        return self._scheduler.num_wanted

    @property
    def is_idle(self) -> bool:
        """True if no request waits and no sequence runs."""
        return self._scheduler.is_idle

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._scheduler.waiting)

    @property
    def num_live(self) -> int:
        """How many sequences hold a slot."""
        return self._scheduler.num_live

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot; raises SampleError if its prompt can never fit."""
        found, wanted = len(request.prompt_ids), self._shape.max_prompt_tokens
        if not 1 <= found <= wanted:
            raise SampleError("prompt_too_long", f"{found} prompt tokens; at most {wanted} fit")
        self._scheduler.waiting.append(request)

    def close(self) -> None:
        """Say that no further request will be submitted, so that none waits for company."""
        self._scheduler.is_closed = True

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Advance every live sequence by one token; return those that ended."""
        finished: list[Sequence] = []
        if self._scheduler.can_prefill():
            finished += self._prefill(self._scheduler.next_batch())
        if self._scheduler.num_live:
            finished += self._decode()
        if self._scheduler.num_live == 0:
            self.check_integrity()
        return finished

    def check_integrity(self) -> None:
        """Assert that with no live sequence every slot is free."""
        assert not any(self._cache.lengths), "a slot was lost"

    def _prefill(self, requests: list[Request]) -> list[Sequence]:
        features, failed = self._encode(requests)
        ready = [request for request in requests if id(request) in features]
        if not ready:
            return failed
        started = time.perf_counter()
        batch = left_pad([request.prompt_ids for request in ready], self._shape.device)
        slots = self._scheduler.free_slots(len(ready))
        rows = [features[id(request)] for request in ready]
        seen = [row for row in rows if row is not None]
        logits = self._model.next_logits(
            batch.ids,
            torch.cat(seen) if seen else None,
            batch.positions,
            batch.mask,
            self._cache.prefill_view(slots, batch),
        )
        sequences = self._admit(ready, slots)
        repeated = logits.repeat_interleave(self._sampling.num_captions, dim=0)
        settled = self._settle(sequences, repeated)
        self.counters.prefills += 1
        self.counters.prompt_tokens += sum(batch.lengths)
        self.counters.padding_tokens += batch.num_padding_tokens
        self.counters.prefill_seconds += time.perf_counter() - started
        return failed + settled

    def _encode(self, requests: Rows[Request]) -> tuple[dict[int, Tensor | None], list[Sequence]]:
        """Run the vision tower; a request whose features do not fit its prompt fails alone."""
        started = time.perf_counter()
        seeing = [request for request in requests if request.images is not None]
        encoded = self._model.encode_images([r.images for r in seeing if r.images is not None])
        features: dict[int, Tensor | None] = {id(request): None for request in requests}
        features.update({id(r): f for r, f in zip(seeing, encoded, strict=True)})
        failed: list[Sequence] = []
        for request in requests:
            row = features[id(request)]
            wanted = request.prompt_ids.count(self._model.image_token_id)
            found = 0 if row is None else row.shape[0]
            if found != wanted:
                del features[id(request)]
                failed += self._fail(
                    request,
                    "placeholder_mismatch",
                    f"key {request.ref.key!r}: {wanted} image places in the prompt, "
                    f"{found} image features",
                )
        self.counters.vision_seconds += time.perf_counter() - started
        return features, failed

    def _fail(self, request: Request, code: str, detail: str) -> list[Sequence]:
        sequences = [self._sequence(request, i) for i in range(self._sampling.num_captions)]
        for sequence in sequences:
            sequence.error = SampleError(code, detail)
        return sequences

    def _sequence(self, request: Request, caption_index: int) -> Sequence:
        numbers = row_random(self._sampling.seed, request.ref.key, caption_index)
        return Sequence(request, caption_index, numbers)

    def _admit(self, requests: Rows[Request], slots: Rows[int]) -> list[Sequence]:
        """Place a sequence for each caption; further captions of an image copy its slot."""
        sequences = []
        for request, slot in zip(requests, slots, strict=True):
            sequences.append(first := self._sequence(request, 0))
            self._scheduler.place(first, slot)
        grouped: list[Sequence] = []
        for first in sequences:
            grouped.append(first)
            for caption_index in range(1, self._sampling.num_captions):
                copy = self._sequence(first.request, caption_index)
                (slot,) = self._scheduler.free_slots(1)
                self._cache.copy(first.slot, slot)
                self._scheduler.place(copy, slot)
                grouped.append(copy)
        return grouped

    def _decode(self) -> list[Sequence]:
        started = time.perf_counter()
        for source, target in self._scheduler.gaps():
            self._cache.move(source, target)
            self._scheduler.move(source, target)
        live = self._scheduler.live()
        last = [[sequence.token_ids[-1]] for sequence in live]
        view = self._cache.decode_view(len(live))
        ids = torch.tensor(last, device=self._shape.device)
        logits = self._model.next_logits(ids, None, view.positions, view.mask, view)
        settled = self._settle(live, logits)
        self.counters.decode_steps += 1
        self.counters.busy_slot_steps += len(live)
        self.counters.total_slot_steps += self._cache.num_slots
        self.counters.decode_seconds += time.perf_counter() - started
        return settled

    def _settle(self, sequences: Rows[Sequence], logits: Tensor) -> list[Sequence]:
        """Give each sequence its token; free the slots of those that ended."""
        ids, logprobs = self._sampler.choose(logits, sequences)
        ended = []
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            if math.isfinite(logprob):
                sequence.token_ids.append(token)
                sequence.sum_logprob += logprob
                sequence.finish_reason = self._rules.finish_reason(sequence.token_ids)
                self.counters.new_tokens += 1
            else:
                sequence.error = SampleError("not_finite", "the network's answer is not finite")
                self._cache.wipe(sequence.slot)
            if sequence.is_finished:
                self._cache.free(sequence.slot)
                self._scheduler.release(sequence)
                ended.append(sequence)
        return ended
