"""Anything that `transformers` loads as image-text-to-text, behind the same seam (an extra).

Batches are static: a batch of prompts, padded on the left, runs until its last row has ended.
The library runs the network and its cache. Which token comes next, and when a row ends, is
decided by our own sampler and stop rules, so a caption depends on its seed and key alone and
rows read the same as those of the native backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.backends.answers import Answers
from pipeline.captioner import PromptPreview, RequestSource, SamplingSettings, SpeedSettings
from pipeline.engine import sequence as engine_sequence
from pipeline.engine.memory import OUT_OF_MEMORY, is_out_of_memory
from pipeline.engine.sampling import Sampler
from pipeline.engine.sequence import row_random
from pipeline.engine.stopping import StopRules
from pipeline.errors import CheckpointError, SampleError
from pipeline.processors.foreign import ForeignProcessor
from pipeline.records import Caption, EngineCounters, ImageFacts, ImageInputs, Request, SampleRef

Network = Any  # a PreTrainedModel of the library, which is not there where this is read


@dataclass(frozen=True, slots=True)
class TextRequest(Request):
    """A request whose prompt stays text until its batch is made: the library pads jointly."""

    text: str = ""


class TransformersCaptioner:
    """The library's network and processor, in static batches."""

    cache_bytes = 0  # the library grows its cache as it goes

    def __init__(
        self,
        model: Network,
        processor: ForeignProcessor,
        sampling: SamplingSettings,
        speed: SpeedSettings,
    ) -> None:
        self.counters = EngineCounters()
        self.notices: list[str] = []
        self._model = model
        self._processor = processor
        self._sampling = sampling
        self._batch = max(1, speed.prefill_batch // sampling.num_captions)
        self._eos_ids = _eos_ids(model, processor)
        self._sampler = Sampler(sampling, self._eos_ids)
        self._answers = Answers(processor.detokenise, self._eos_ids, sampling.stop)
        self._rules = self._answers.rules(sampling)
        _neutralise(model)

    def under(self, sampling: SamplingSettings, speed: SpeedSettings) -> TransformersCaptioner:
        """Return the same network under other settings, its weights shared, its counters at 0."""
        return TransformersCaptioner(self._model, self._processor, sampling, speed)

    def prepare(
        self,
        ref: SampleRef,
        facts: ImageFacts,
        image: Image.Image,
        prompt: str,
        kept: Mapping[str, str | None],
    ) -> Request:
        """Keep an RGB image and its final text; safe on any thread."""
        text = self._processor.chat_text(prompt)
        found, wanted = self._processor.num_text_tokens(text), self._sampling.max_text_tokens
        if found > wanted:
            raise SampleError("prompt_too_long", f"{found} prompt tokens; at most {wanted} fit")
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        return TextRequest(ref, facts, (), ImageInputs(pixels), kept, text)

    def preview(self, image: Image.Image, prompt: str) -> PromptPreview:
        """Show what the library makes of a prompt."""
        text = self._processor.chat_text(prompt)
        inputs = self._processor.batch([text], [image])
        ids = inputs["input_ids"][0].tolist()
        return PromptPreview(self._processor.shown(ids), tuple(ids))

    def caption(self, source: RequestSource) -> Iterator[Caption]:
        """Answer each request exactly `num_captions` times, batch by batch."""
        while True:
            started = time.perf_counter()
            batch: list[TextRequest] = []
            while len(batch) < self._batch and not source.is_exhausted:
                taken = source.take(self._batch - len(batch), block=True)
                batch += [request for request in taken if isinstance(request, TextRequest)]
                if not taken:
                    break
            self.counters.waiting_seconds += time.perf_counter() - started
            if not batch:
                return
            yield from self._answer(batch)

    def _answer(self, batch: Sequence[TextRequest]) -> Iterator[Caption]:
        """Caption a batch; where the library or memory refuses it, its halves."""
        try:
            captions = self._run(batch)
        except Exception as error:  # a foreign processor or network can raise anything
            code = "processor_failed"
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                code = OUT_OF_MEMORY
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            yield from captions
            return
        if len(batch) > 1:
            middle = len(batch) // 2
            if code == OUT_OF_MEMORY:
                self._batch = min(self._batch, middle)
                self.notices.append(
                    f"out of memory with {len(batch)} prompts: from now on at most {self._batch}"
                )
            yield from self._answer(batch[:middle])
            yield from self._answer(batch[middle:])
            return
        for index in range(self._sampling.num_captions):
            yield Caption(batch[0], index, error=code, error_detail=detail)

    @torch.inference_mode()
    def _run(self, batch: Sequence[TextRequest]) -> list[Caption]:
        started = time.perf_counter()
        images = [_picture(request) for request in batch]
        inputs = self._processor.batch([request.text for request in batch], images)
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        self.counters.vision_seconds += time.perf_counter() - started
        inputs = inputs.to(self._model.device, self._model.dtype)
        steps = _Steps(batch, self._sampling, self._sampler, self._rules, self.counters)
        is_many = self._sampling.num_captions > 1
        started = time.perf_counter()
        self._model.generate(
            **inputs,
            max_new_tokens=self._sampling.max_new_tokens,
            # Every token but the chosen one is impossible by then: this draws nothing. The
            # library repeats prompts for several captions only where it believes to draw.
            do_sample=is_many,
            num_return_sequences=self._sampling.num_captions,
            logits_processor=[steps.choose],
            stopping_criteria=[steps.are_finished],
        )
        self.counters.decode_seconds += time.perf_counter() - started
        self.counters.prefills += 1
        self.counters.prompt_tokens += sum(lengths)
        self.counters.padding_tokens += max(lengths) * len(lengths) - sum(lengths)
        counted = [length for length in lengths for _ in range(self._sampling.num_captions)]
        return [self._answers.caption(*each) for each in zip(steps.sequences, counted, strict=True)]


class _Steps:
    """Our sampler and stop rules, called by the library once a step."""

    def __init__(
        self,
        batch: Sequence[TextRequest],
        sampling: SamplingSettings,
        sampler: Sampler,
        rules: StopRules,
        counters: EngineCounters,
    ) -> None:
        self.sequences = [
            engine_sequence.Sequence(
                request, index, row_random(sampling.seed, request.ref.key, index)
            )
            for request in batch
            for index in range(sampling.num_captions)
        ]
        self._sampler = sampler
        self._rules = rules
        self._counters = counters

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Give each live row its token, and make every other token of `[B, V]` impossible."""
        logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows = [row for row, each in enumerate(self.sequences) if not each.is_finished]
        live = [self.sequences[row] for row in rows]
        forced = torch.zeros(len(self.sequences), dtype=torch.long)
        tokens, logprobs = self._sampler.choose(logits[rows], live)
        for row, sequence, token, logprob in zip(rows, live, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                detail = "the network's answer is not a finite number"
                sequence.error = SampleError("not_finite", detail)
                continue
            sequence.append(token, logprob)
            sequence.finish_reason = self._rules.finish_reason(sequence.token_ids)
            forced[row] = token
        self._counters.new_tokens += len(rows)
        self._counters.decode_steps += 1
        self._counters.busy_slot_steps += len(rows)
        self._counters.total_slot_steps += len(self.sequences)
        only = torch.full_like(scores, float("-inf"))
        return only.scatter(1, forced.to(scores.device)[:, None], 0.0)

    def are_finished(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Tell the library which rows have ended."""
        ended = [sequence.is_finished for sequence in self.sequences]
        return torch.tensor(ended, device=input_ids.device)


def _picture(request: TextRequest) -> Image.Image:
    assert request.images is not None, "every request of this backend has a picture"
    return Image.fromarray(request.images.pixels[0].permute(1, 2, 0).numpy())


def _eos_ids(model: Network, processor: ForeignProcessor) -> frozenset[int]:
    """Return the ids that end a caption, as the library's own `generate` would read them."""
    for found in (model.generation_config.eos_token_id, processor.eos_id):
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    raise CheckpointError("this checkpoint names no end token; wanted one that does")


def _neutralise(model: Network) -> None:
    """Take the checkpoint's own sampling habits away: the job's settings are the only ones.

    What belongs to the network, such as the token that a decoder starts with, stays.
    """
    config = model.generation_config
    for name, value in {
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "typical_p": None,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "length_penalty": 1.0,
        "max_length": None,
        "min_length": 0,
        "do_sample": False,
        "early_stopping": False,
        "eos_token_id": None,
    }.items():
        with suppress(AttributeError):
            setattr(config, name, value)
    if config.pad_token_id is None:
        config.pad_token_id = 0
