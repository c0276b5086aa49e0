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

from pipeline.captioner import SamplingSettings
from pipeline.engine.cache import KVCache, group_borders
from pipeline.engine.memory import OUT_OF_MEMORY, is_out_of_memory
from pipeline.engine.padding import left_pad
from pipeline.engine.sampling import Sampler
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence, row_random
from pipeline.engine.stopping import StopRules
from pipeline.errors import SampleError
from pipeline.models.vlm import CaptionModel
from pipeline.records import EngineCounters, Request

ROW_BLOCK = 8


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
        notices: list[str] | None = None,
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
        self._borders = group_borders(shape.num_slots, shape.device)
        self.counters = counters or EngineCounters()
        self.notices = [] if notices is None else notices  # for people, each said once

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
        sequence = self._sequence(request, 0)
        sequence.num_siblings = self._sampling.num_captions - 1
        self._scheduler.waiting.append(sequence)

    def close(self) -> None:
        """Say that no further request will be submitted, so that none waits for company."""
        self._scheduler.is_closed = True

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Advance every live sequence by one token; return those that ended."""
        finished: list[Sequence] = []
        self._close_gaps()  # before new sequences would fill them
        if self._scheduler.can_prefill():
            finished += self._prefill_or_shrink(self._scheduler.next_batch())
        if self._scheduler.num_live:
            finished += self._decode_or_shrink()
        if self._scheduler.num_live == 0:
            self.check_integrity()
        return finished

    def check_integrity(self) -> None:
        """Assert that with no live sequence every slot is free."""
        assert not any(self._cache.lengths), "a slot was lost"

    def _prefill_or_shrink(self, batch: list[Sequence]) -> list[Sequence]:
        """Prefill a batch; where memory does not suffice, halve the batch for good."""
        try:
            return self._prefill(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside of `except`: the error's traceback would keep the tensors alive.
        self._free_unplaced_slots()
        if len(batch) == 1:
            return self._fail(batch[0], OUT_OF_MEMORY, "its prompt does not fit in memory alone")
        self._scheduler.prefill_batch = len(batch) // 2
        self.notices.append(
            f"out of memory with {len(batch)} prompts in a prefill: "
            f"from now on at most {self._scheduler.prefill_batch}"
        )
        self._scheduler.put_back(batch)
        return []

    def _decode_or_shrink(self) -> list[Sequence]:
        """Decode a step; where memory does not suffice, halve the live sequences for good."""
        try:
            return self._decode()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        live = self._scheduler.live()
        num_kept = max(1, len(live) // 2, self._sampling.num_captions)
        if num_kept >= len(live):
            failed, *preempted = live
            ended = self._end_in_error(
                failed, OUT_OF_MEMORY, "its caption does not fit in memory alone"
            )
        else:
            preempted, ended = live[num_kept:], []
            self._scheduler.max_live = num_kept
            self.notices.append(
                f"out of memory with {len(live)} live sequences: from now on at most {num_kept}"
            )
        for sequence in preempted:
            self._cache.free(sequence.slot)
        self._scheduler.put_back(preempted)
        return ended

    def _free_unplaced_slots(self) -> None:
        """Forget the lengths that a prefill which did not end has claimed."""
        for slot, sequence in enumerate(self._scheduler.slots):
            if sequence is None:
                self._cache.free(slot)

    def _prefill(self, batch: list[Sequence]) -> list[Sequence]:
        failed = self._encode(batch)
        ready = [sequence for sequence in batch if not sequence.is_finished]
        if not ready:
            return failed
        started = time.perf_counter()
        padded = left_pad([sequence.prefix_ids for sequence in ready], self._shape.device)
        slots = self._scheduler.free_slots(len(ready))
        features = [s.features for s in ready if s.features is not None]
        logits = self._model.next_logits(
            padded.ids,
            torch.cat(features) if features else None,
            padded.positions,
            padded.mask,
            self._cache.prefill_view(slots, padded),
        )
        repeats = torch.tensor([1 + s.num_siblings for s in ready], device=logits.device)
        families = [self._with_siblings(lead) for lead in ready]
        sequences = [sequence for family in families for sequence in family]
        chosen = self._sampler.choose(logits.repeat_interleave(repeats, dim=0), sequences)
        self._admit(families, slots)
        settled = self._settle(sequences, *chosen)
        self.counters.prefills += 1
        self.counters.prompt_tokens += sum(padded.lengths)
        self.counters.padding_tokens += padded.num_padding_tokens
        self.counters.prefill_seconds += time.perf_counter() - started
        return failed + settled

    def _encode(self, batch: Rows[Sequence]) -> list[Sequence]:
        """Run the vision tower; a request whose features do not fit its prompt fails alone."""
        started = time.perf_counter()
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
                failed += self._fail(sequence, "placeholder_mismatch", f"key {key!r}: {detail}")
        self.counters.vision_seconds += time.perf_counter() - started
        return failed

    def _fail(self, sequence: Sequence, code: str, detail: str) -> list[Sequence]:
        """End a sequence that holds no slot, and its siblings with it."""
        family = self._with_siblings(sequence)
        for each in family:
            each.error = SampleError(code, detail)
        return family

    def _end_in_error(self, sequence: Sequence, code: str, detail: str) -> list[Sequence]:
        """End a live sequence by itself."""
        sequence.error = SampleError(code, detail)
        self._cache.free(sequence.slot)
        self._scheduler.release(sequence)
        return [sequence]

    def _sequence(self, request: Request, caption_index: int) -> Sequence:
        numbers = row_random(self._sampling.seed, request.ref.key, caption_index)
        return Sequence(request, caption_index, numbers)

    def _with_siblings(self, lead: Sequence) -> list[Sequence]:
        family = [lead]
        for caption_index in range(1, 1 + lead.num_siblings):
            sibling = self._sequence(lead.request, caption_index)
            sibling.features = lead.features  # for a prefill of its own, if it loses its slot
            family.append(sibling)
        return family

    def _admit(self, families: Rows[Rows[Sequence]], slots: Rows[int]) -> None:
        """Place each prefilled sequence; further captions of its image copy its slot."""
        for (lead, *_), slot in zip(families, slots, strict=True):
            self._scheduler.place(lead, slot)
        for lead, *siblings in families:
            for sibling in siblings:
                (slot,) = self._scheduler.free_slots(1)
                self._cache.copy(lead.slot, slot)
                self._scheduler.place(sibling, slot)
            lead.num_siblings = 0

    def _decode(self) -> list[Sequence]:
        started = time.perf_counter()
        self._close_gaps()
        live = self._scheduler.live()
        num_rows = min(rounded_rows(len(live)), self._scheduler.max_live)
        # Rows beyond the live ones write into free slots, and nobody reads their logits.
        last = [[sequence.token_ids[-1]] for sequence in live] + [[0]] * (num_rows - len(live))
        view = self._cache.decode_view(num_rows)
        ids = torch.tensor(last, device=self._shape.device)
        logits = self._model.next_logits(ids, None, view.positions, view.mask, view)
        chosen = self._sampler.choose(logits[: len(live)], live)
        self._cache.advance(len(live))
        settled = self._settle(live, *chosen)
        self.counters.decode_steps += 1
        self.counters.busy_slot_steps += len(live)
        self.counters.total_slot_steps += self._cache.num_slots
        self.counters.decode_seconds += time.perf_counter() - started
        return settled

    def _close_gaps(self) -> None:
        for source, target in self._scheduler.close_gaps(self._borders):
            self._cache.move(source, target)

    def _settle(
        self, sequences: Rows[Sequence], ids: Rows[int], logprobs: Rows[float]
    ) -> list[Sequence]:
        """Give each sequence its token; free the slots of those that ended."""
        ended: list[Sequence] = []
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._cache.wipe(sequence.slot)
                ended += self._end_in_error(
                    sequence, "not_finite", "the network's answer is not a finite number"
                )
                continue
            sequence.append(token, logprob)
            sequence.finish_reason = self._rules.finish_reason(sequence.token_ids)
            self.counters.new_tokens += 1
            if sequence.is_finished:
                self._cache.free(sequence.slot)
                self._scheduler.release(sequence)
                ended.append(sequence)
        return ended


def rounded_rows(num_rows: int) -> int:
    """Return how many rows a decode step runs for so many live ones: a power of 2, or eights.

    Each new shape costs kernels that are compiled, and kept.
    """
    if num_rows >= ROW_BLOCK:
        return -(-num_rows // ROW_BLOCK) * ROW_BLOCK
    return 1 << (num_rows - 1).bit_length()
