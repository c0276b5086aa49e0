"""Our own networks and engine behind the job's seam."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from pipeline.backends.answers import Answers
from pipeline.backends.placement import Placement
from pipeline.captioner import PromptPreview, RequestSource, SamplingSettings, SpeedSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.memory import is_out_of_memory
from pipeline.errors import JobError, RequestError, SampleError
from pipeline.kernels import library
from pipeline.models.linear import lay_out
from pipeline.models.vlm import CaptionModel
from pipeline.processors.processor import Processor
from pipeline.records import Caption, EngineCounters, ImageFacts, Request, SampleRef

if TYPE_CHECKING:
    from PIL import Image


class NativeCaptioner:
    """A network, its processor and the engine that runs it."""

    def __init__(
        self,
        model: CaptionModel,
        processor: Processor,
        placement: Placement,
        sampling: SamplingSettings,
        speed: SpeedSettings,
    ) -> None:
        if speed.slots < sampling.num_captions:
            raise RequestError(
                f"--slots is {speed.slots}; wanted --num-captions ({sampling.num_captions}) "
                "or more: the captions of one image run together"
            )
        self.counters = EngineCounters()
        self.notices: list[str] = []
        if isinstance(model, nn.Module):
            lay_out(model)
        if placement.device.type == "cpu" and library.found() is None:
            self.notices.append("decoding is slower: captionjob was installed without a C compiler")
        self._model = model
        self._processor = processor
        self._answers = Answers(processor.detokenise, processor.eos_ids, sampling.stop)
        self._placement = placement
        self._sampling = sampling
        self._speed = speed

    def under(self, sampling: SamplingSettings, speed: SpeedSettings) -> NativeCaptioner:
        """Return the same network under other settings, its weights shared, its counters at 0."""
        other = copy.copy(self)
        other.counters, other.notices = EngineCounters(), []
        other._sampling, other._speed = sampling, speed
        other._answers = Answers(self._processor.detokenise, self._processor.eos_ids, sampling.stop)
        return other

    def prepare(
        self,
        ref: SampleRef,
        facts: ImageFacts,
        image: Image.Image,
        prompt: str,
        kept: Mapping[str, str | None],
    ) -> Request:
        """Make an RGB image and a prompt ready for the network; safe on any thread."""
        ids, images = self._processor.prepare(image, prompt)
        return Request(ref=ref, facts=facts, prompt_ids=ids, images=images, kept=kept)

    def preview(self, image: Image.Image, prompt: str) -> PromptPreview:
        """Show what `prepare` makes of a prompt."""
        ids, _ = self._processor.prepare(image, prompt)
        return PromptPreview(self._processor.render(image, prompt), ids)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that the cache has room for."""
        wanted = self._processor.max_image_tokens + self._sampling.max_text_tokens
        room = self._model.spec.max_positions - self._sampling.max_new_tokens + 1
        if room < 1:
            raise RequestError(
                f"--max-new-tokens is {self._sampling.max_new_tokens}; this network's "
                f"positions end at {self._model.spec.max_positions}"
            )
        return min(wanted, room)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache takes, allocated once when captioning starts."""
        columns = self.max_prompt_tokens + self._sampling.max_new_tokens - 1
        per_token = self._model.spec.cache_bytes_per_token(self._placement.dtype)
        return self._speed.slots * columns * per_token

    def caption(self, source: RequestSource) -> Iterator[Caption]:
        """Answer each request exactly `num_captions` times, in the order they finish."""
        self._placement.enter()
        engine = self._engine()
        while True:
            yield from self._refill(engine, source)
            if engine.is_idle and source.is_exhausted:
                return
            for ended in engine.step():
                yield self._answers.caption(ended, ended.num_prompt_tokens)

    def _engine(self) -> Engine:
        """Allocate the cache; where memory does not suffice, with half the slots, and so on."""
        num_slots = self._speed.slots
        while True:
            try:
                return self._engine_with(num_slots)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if num_slots // 2 < self._sampling.num_captions:
                raise JobError(
                    f"the KV cache of {num_slots} slots does not fit in memory; wanted a smaller "
                    "--max-text-tokens or --max-new-tokens, or a larger device"
                )
            self.notices.append(
                f"out of memory with a cache of {num_slots} slots: it has {num_slots // 2} now"
            )
            num_slots //= 2

    def _engine_with(self, num_slots: int) -> Engine:
        shape = EngineShape(
            num_slots=num_slots,
            prefill_batch=self._speed.prefill_batch,
            max_prompt_tokens=self.max_prompt_tokens,
            dtype=self._placement.dtype,
            device=self._placement.device,
        )
        rules = self._answers.rules(self._sampling)
        return Engine(self._model, shape, self._sampling, rules, self.counters, self.notices)

    def _refill(self, engine: Engine, source: RequestSource) -> Iterator[Caption]:
        """Pull requests without letting live sequences wait; with none, wait for a batch."""
        is_waiting = engine.num_live == 0
        started = time.perf_counter()
        while engine.num_wanted and not source.is_exhausted:
            block = is_waiting and engine.num_waiting < self._speed.prefill_batch
            requests = source.take(engine.num_wanted, block=block)
            for request in requests:
                try:
                    engine.submit(request)
                except SampleError as error:
                    yield from self._errors(request, error)
            if not requests:
                break
        if source.is_exhausted:
            engine.close()
        if is_waiting:
            self.counters.waiting_seconds += time.perf_counter() - started

    def _errors(self, request: Request, error: SampleError) -> Iterator[Caption]:
        for caption_index in range(self._sampling.num_captions):
            yield Caption(request, caption_index, error=error.code, error_detail=error.detail)
