"""captionjob's own ways to caption: the engine, one image at a time, and without the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.backends.native import NativeCaptioner
from pipeline.backends.placement import Placement
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.models.vlm import CaptionModel
from pipeline.records import Caption, EngineCounters, ImageInputs, Request
from scripts.benchmark.clock import now
from scripts.benchmark.shapes import EOS_ID, NetworkShape
from scripts.benchmark.workload import MAX_TEXT, Outcome, Workload

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class IdProcessor:
    """A tokenizer's place in a benchmark: text is the ids themselves, set apart by blanks."""

    shape: NetworkShape
    default_prompt: str = ""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end token."""
        return frozenset({EOS_ID})

    @property
    def max_image_tokens(self) -> int:
        """Places of the one picture."""
        return self.shape.num_image_tokens

    def prepare(self, image: Image.Image, prompt: str) -> tuple[tuple[int, ...], ImageInputs]:
        """Refuse: requests come ready-made here."""
        raise AssertionError("requests come ready-made here")

    def render(self, image: Image.Image, prompt: str) -> str:
        """Refuse: requests come ready-made here."""
        raise AssertionError("requests come ready-made here")

    def detokenise(self, ids: Sequence[int]) -> str:
        """Write ids as text."""
        return " ".join(map(str, ids))


class ReadyRequests:
    """All requests at hand at once: a loader that is never late."""

    def __init__(self, requests: Sequence[Request], counters: EngineCounters) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self._counters = counters
        self.is_exhausted = False
        self.busy_before_tail: float | None = None  # share of slots busy while requests came

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return the next requests; fewer only at the end."""
        taken: list[Request] = []
        while len(taken) < max_requests:
            request = next(self._requests, None)
            if request is None:
                self._exhaust()
                break
            taken.append(request)
        return taken

    def _exhaust(self) -> None:
        self.is_exhausted = True
        if self._counters.total_slot_steps:
            busy, all_steps = self._counters.busy_slot_steps, self._counters.total_slot_steps
            self.busy_before_tail = busy / all_steps


CPU = torch.device("cpu")


class EngineContender:
    """The engine behind the same seam that `captionjob run` uses."""

    def __init__(
        self,
        name: str,
        model: CaptionModel,
        dtype: torch.dtype,
        *,
        slots: int,
        prefill: int,
        device: torch.device = CPU,
    ) -> None:
        self.name = name
        self._model = model
        self._placement = Placement(device, dtype)
        self._speed = SpeedSettings(slots=slots, prefill_batch=prefill)

    def run(self, workload: Workload) -> Outcome:
        """Caption the workload through slots."""
        captioner = NativeCaptioner(
            self._model,
            IdProcessor(workload.shape),
            self._placement,
            SamplingSettings(
                max_new_tokens=workload.max_new_tokens, max_text_tokens=MAX_TEXT, max_repeats=0
            ),
            self._speed,
        )
        source = ReadyRequests(workload.requests, captioner.counters)
        began, began_wall = now(), time.perf_counter()
        tokens = {
            caption.request.ref.index: caption_ids(caption) for caption in captioner.caption(source)
        }
        seconds, wall_seconds = now() - began, time.perf_counter() - began_wall
        # The engine's own counters are wall time, whatever the contest is measured by.
        counts = _shares(captioner.counters, wall_seconds)
        if source.busy_before_tail is not None:
            counts["slots_busy_before_tail"] = source.busy_before_tail
        return Outcome(tokens, seconds, counts)


def caption_ids(caption: Caption) -> tuple[int, ...]:
    """Return a caption's ids, the end token included."""
    assert caption.error is None, f"{caption.error}: {caption.error_detail}"
    ids = tuple(map(int, (caption.text or "").split()))
    return (*ids, EOS_ID) if caption.finish_reason == "eos" else ids


def _shares(counters: EngineCounters, seconds: float) -> dict[str, float]:
    prompt = counters.prompt_tokens + counters.padding_tokens
    return {
        "padding": counters.padding_tokens / max(1, prompt),
        "slots_busy": counters.busy_slot_steps / max(1, counters.total_slot_steps),
        "decode_steps": counters.decode_steps,
        "decode_step_ms": 1000 * counters.decode_seconds / max(1, counters.decode_steps),
        "vision_share": counters.vision_seconds / seconds,
        "prefill_share": counters.prefill_seconds / seconds,
        "decode_share": counters.decode_seconds / seconds,
        "waiting_share": counters.waiting_seconds / seconds,
    }


class UncachedContender:
    """Our own network one image at a time, running the whole sequence again for each token."""

    def __init__(self, name: str, model: CaptionModel) -> None:
        self.name = name
        self._model = model

    @torch.inference_mode()
    def run(self, workload: Workload) -> Outcome:
        """Caption the workload row by row."""
        began = now()
        tokens = {r.ref.index: self._caption(r, workload) for r in workload.requests}
        return Outcome(tokens, now() - began)

    def _caption(self, request: Request, workload: Workload) -> tuple[int, ...]:
        assert request.images is not None, "every request of a benchmark has a picture"
        (features,) = self._model.encode_images([request.images])
        ids: list[int] = []
        while len(ids) < workload.max_new_tokens and EOS_ID not in ids[-1:]:
            logits = uncached_logits(self._model, [*request.prompt_ids, *ids], features)
            ids.append(int(logits.argmax()))
        return tuple(ids)


def uncached_logits(model: CaptionModel, prefix: list[int], features: Tensor) -> Tensor:
    """Return the logits `[1, V]` that follow a prefix, all of it run anew."""
    length, device = len(prefix), features.device
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    positions = torch.arange(length, device=device)[None]
    ids = torch.tensor([prefix], device=device)
    return model.next_logits(ids, features, positions, mask, None)
