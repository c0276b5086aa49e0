"""The engine: requests in, finished sequences out, one step at a time.

A step has three beats. *Schedule*: if enough slots are free, the oldest waiting requests run
through the network together (vision, then a left-padded prefill) and take slots. *Run*: every
live sequence gets one token. *Settle*: each that ended frees its slot at once. On a GPU, what is
settled is the step before, while this one runs (`pipeline.engine.in_flight`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.cache import KVCache, group_borders
from pipeline.engine.decoding import Decoder, EagerDecoder
from pipeline.engine.device import CapturingDevice, Device
from pipeline.engine.in_flight import Flight, InFlight
from pipeline.engine.memory import OUT_OF_MEMORY, is_out_of_memory
from pipeline.engine.prompts import Admission, Prompts
from pipeline.engine.said import Said
from pipeline.engine.sampling import Sampler
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence
from pipeline.engine.static_decoding import StaticDecoder
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
    """Owns the loop; `Scheduler` owns slots, `KVCache` owns tensors, `Sequence` its own life.

    `Prompts` and a `Decoder` call the network, `Device` says when what it answers is there.
    """

    def __init__(
        self,
        model: CaptionModel,
        shape: EngineShape,
        sampling: SamplingSettings,
        rules: StopRules,
        counters: EngineCounters | None = None,
        notices: list[str] | None = None,
        device: Device | None = None,
    ) -> None:
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
        self._device = device or Device.of(shape.device)
        self._said = Said(shape.num_slots, self._sampler.num_kept, shape.device)
        self._in_flight = InFlight(self._device.lag)
        self._prompts = Prompts(
            model, self._cache, self._said, self._sampler, self._device, self.counters
        )
        parts = (model, self._cache, self._said, self._sampler)
        self._decoder: Decoder = (
            StaticDecoder(*parts, self._device, self.notices)
            if isinstance(self._device, CapturingDevice)
            else EagerDecoder(*parts)
        )

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
        request = self._device.upload_images(request)
        sequence = Sequence.begin(request, 0, self._sampling.seed)
        sequence.num_siblings = self._sampling.num_captions - 1
        self._scheduler.waiting.append(sequence)

    def close(self) -> None:
        """Say that no further request will be submitted, so that none waits for company."""
        self._scheduler.is_closed = True

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Advance every live sequence by one token; return those that are known to have ended."""
        finished: list[Sequence] = []
        self._close_gaps()  # before new sequences would fill them
        if self._scheduler.can_prefill():
            finished += self._prefill_or_shrink(self._scheduler.next_batch())
        self._close_gaps()
        live = self._scheduler.live()
        if any(sequence.num_chosen < self._rules.max_new_tokens for sequence in live):
            finished += self._decode_or_shrink(live)
        elif live:
            finished += self._land(self._in_flight.next())
        if self._scheduler.num_live == 0:
            self._in_flight.forget()
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
        if self._decoder.give_up_memory():
            self._scheduler.put_back(batch)
            return []
        if len(batch) == 1:
            return batch[0].fail(OUT_OF_MEMORY, "its prompt does not fit in memory alone")
        self._scheduler.prefill_batch = len(batch) // 2
        self.notices.append(
            f"out of memory with {len(batch)} prompts in a prefill: "
            f"from now on at most {self._scheduler.prefill_batch}"
        )
        self._scheduler.put_back(batch)
        return []

    def _decode_or_shrink(self, live: list[Sequence]) -> list[Sequence]:
        """Decode a step; where memory does not suffice, halve the live sequences for good."""
        num_live = len(live)
        try:
            return self._decode(live)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self._decoder.give_up_memory():
            return []
        ended = self._land(self._in_flight.all())  # who loses its slot takes its tokens along
        live = self._scheduler.live()
        num_kept = max(1, num_live // 2, self._sampling.num_captions)
        if num_kept < num_live:
            preempted = live[num_kept:]
            self._scheduler.max_live = num_kept
            self.notices.append(
                f"out of memory with {num_live} live sequences: from now on at most {num_kept}"
            )
        else:
            preempted = live[1:]
            for sequence in live[:1]:
                detail = "its caption does not fit in memory alone"
                sequence.error = SampleError(OUT_OF_MEMORY, detail)
                self._free(sequence, is_clean=True)
                ended.append(sequence)
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
        with self._device.stage(self.counters, "vision"):
            failed = self._prompts.encode(batch)
        ready = [sequence for sequence in batch if not sequence.is_finished]
        if not ready:
            return failed
        with self._device.stage(self.counters, "prefill"):
            admitted = Admission.of(ready, self._scheduler.free_slots)
            read = self._prompts.run(admitted)
            self._admit(admitted)
            self._in_flight.queue(admitted.sequences, read, is_decode=False)
            return failed + self._land(self._in_flight.due())

    def _admit(self, admitted: Admission) -> None:
        """Place each sequence; a further caption copies the slot of its prompt."""
        for number, sequence in enumerate(admitted.sequences):
            row, slot = admitted.rows[number], admitted.slots[number]
            if number != row:
                self._cache.copy(admitted.slots[row], slot)
            self._scheduler.place(sequence, slot)
            sequence.num_siblings = 0

    def _decode(self, live: list[Sequence]) -> list[Sequence]:
        most = self._rules.max_new_tokens
        with self._device.stage(self.counters, "decode"):
            read = self._device.fetch(*self._decoder.step(live, self._scheduler.max_live))
            # Who is at its end stands in its row until the host has read that.
            rows = [sequence if sequence.num_chosen < most else None for sequence in live]
            self._in_flight.queue(rows, read, is_decode=True)
            # The last token of a caption is never run: its keys and values have no column.
            self._cache.advance([s.slot for s in live if s.num_chosen < most])
            self.counters.decode_steps += 1
            self.counters.total_slot_steps += self._cache.num_slots
            return self._land(self._in_flight.due())

    def _close_gaps(self) -> None:
        for source, target in self._scheduler.close_gaps(self._borders):
            self._cache.move(source, target)
            self._said.move(source, target)
            if self._device.lag:
                self._cache.wipe(source)  # if it is not finite, that is found in its new slot

    def _land(self, flights: Iterable[Flight]) -> list[Sequence]:
        """Read prefills and steps; give each sequence its token, and return who ended."""
        ended: list[Sequence] = []
        for flight in flights:
            landed = flight.land()
            for sequence, token, logprob in landed:
                if math.isfinite(logprob):
                    sequence.append(token, logprob)
                    sequence.finish_reason = self._rules.finish_reason(sequence.token_ids)
                    if sequence.finish_reason is None:
                        continue
                else:
                    detail = "the network's answer is not a finite number"
                    sequence.error = SampleError("not_finite", detail)
                self._free(sequence, is_clean=sequence.error is None and not self._device.lag)
                ended.append(sequence)
            self.counters.new_tokens += sum(s.error is None for s, *_ in landed)
            if flight.is_decode:
                self.counters.busy_slot_steps += len(landed)  # a surplus token kept nobody busy
        return ended

    def _free(self, sequence: Sequence, *, is_clean: bool) -> None:
        """Take a sequence's slot back; what may lie in it that is not finite is wiped.

        With a lag, nobody has looked at what a sequence ran past its end.
        """
        if not is_clean:
            self._cache.wipe(sequence.slot)
        self._cache.free(sequence.slot)
        self._scheduler.release(sequence)
