"""Fixed answers without a network, for tests of the job around it: `--model scripted`.

A caption depends on the key, the image's hash, the prompt and the caption index alone.
Behaviour is set in the model's name, `scripted:latency=0.01,shuffle=7,fail=broken`:

    latency=SECONDS   that a step takes                      (shapes no captions)
    shuffle=SEED      sequences finish in a seeded disorder  (shapes no captions)
    fail=TEXT         samples with TEXT in their key get the error `scripted`
    load=SECONDS      that loading takes                     (shapes no captions)
    open=SECONDS      that a loader thread takes an image    (shapes no captions)
    vision=SECONDS    that the network takes an image        (shapes no captions)
    prefill=SECONDS   that the network takes a prefill       (shapes no captions)
    greedy=1          the key has no say, as in a greedy network
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pipeline.captioner import PromptPreview, RequestSource, SamplingSettings, SpeedSettings
from pipeline.errors import RequestError, SampleError
from pipeline.records import Caption, EngineCounters, ImageFacts, Request, SampleRef

if TYPE_CHECKING:
    from PIL import Image

NAME = "scripted"
_THINGS = ("a cheetah", "a red bus", "two cups", "a beach at noon", "an old bridge", "a bowl")


@dataclass(frozen=True, slots=True)
class ScriptedSettings:
    """What the model's name says."""

    latency: float = 0.0
    shuffle: int = 0
    fail: str = ""
    load: float = 0.0
    open: float = 0.0
    vision: float = 0.0
    prefill: float = 0.0
    greedy: int = 0

    @classmethod
    def parse(cls, model: str) -> ScriptedSettings:
        """Read `scripted` or `scripted:NAME=VALUE,...`."""
        kinds: dict[str, Any] = {one.name: type(one.default) for one in fields(cls)}
        found: dict[str, Any] = {}
        for part in filter(None, model.removeprefix(NAME).removeprefix(":").split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise RequestError(f"--model {model!r}: no option {name!r} in scripted")
            try:
                found[name] = kinds[name](value)
            except ValueError as error:
                raise RequestError(f"--model {model!r}: {error}") from None
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ScriptedSource:
    """The fixed answers as a model that is found and not yet loaded."""

    settings: ScriptedSettings
    family: str = NAME
    backend: str = NAME
    default_prompt: str = "Describe the picture."

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What identifies the model in `_job.json`."""
        found = {"name": NAME, "family": NAME, "backend": NAME, "fail": self.settings.fail}
        return found | ({"greedy": "1"} if self.settings.greedy else {})

    def load(self, sampling: SamplingSettings, speed: SpeedSettings) -> ScriptedCaptioner:
        """Wait as long as the settings say."""
        time.sleep(self.settings.load)
        return ScriptedCaptioner(self.settings, sampling, speed)


@dataclass(slots=True)
class ScriptedCaptioner:
    """Holds up to `slots` requests and ends one or more of them at each step."""

    settings: ScriptedSettings
    sampling: SamplingSettings
    speed: SpeedSettings
    counters: EngineCounters = field(default_factory=EngineCounters)
    notices: list[str] = field(default_factory=list)
    cache_bytes: int = 0

    def under(self, sampling: SamplingSettings, speed: SpeedSettings) -> ScriptedCaptioner:
        """Return the same answers under other settings, the counters at 0."""
        return ScriptedCaptioner(self.settings, sampling, speed)

    def prepare(
        self,
        ref: SampleRef,
        facts: ImageFacts,
        image: Image.Image,
        prompt: str,
        kept: Mapping[str, str | None],
    ) -> Request:
        """Make a request without pixels; SampleError where the settings ask for one."""
        time.sleep(self.settings.open)
        if self.settings.fail and self.settings.fail in ref.key:
            raise SampleError("scripted", f"{ref.key} was asked to fail")
        return Request(ref=ref, facts=facts, prompt_ids=_ids(prompt), kept=kept)

    def preview(self, image: Image.Image, prompt: str) -> PromptPreview:
        """Show the prompt as it is, its words hashed to ids."""
        return PromptPreview(prompt, _ids(prompt))

    def caption(self, source: RequestSource) -> Iterator[Caption]:
        """Answer each request `num_captions` times, in an order that the seed shuffles."""
        order = random.Random(self.settings.shuffle)
        live: list[tuple[Request, int]] = []
        while True:
            began = time.perf_counter()
            is_waiting = not live
            admitted: list[Request] = []
            while len(live) < self.speed.slots and not source.is_exhausted:
                requests = source.take(self.speed.slots - len(live), block=not live)
                if not requests:
                    break
                live += [(one, i) for one in requests for i in range(self.sampling.num_captions)]
                admitted += requests
            if is_waiting:
                self.counters.waiting_seconds += time.perf_counter() - began
            if admitted:
                self._prefill(admitted)
            if not live:
                if source.is_exhausted:
                    return
                continue
            yield from self._step(live, order)

    def _step(self, live: list[tuple[Request, int]], order: random.Random) -> Iterator[Caption]:
        began = time.perf_counter()
        time.sleep(self.settings.latency)
        self.counters.decode_steps += 1
        self.counters.busy_slot_steps += min(len(live), self.speed.slots)
        self.counters.total_slot_steps += self.speed.slots
        self.counters.decode_seconds += time.perf_counter() - began
        for _ in range(max(1, len(live) // 4)):
            place = order.randrange(len(live)) if self.settings.shuffle else 0
            request, caption_index = live.pop(place)
            caption = answer(self._asked(request), caption_index)
            caption = replace(caption, request=request)
            self.counters.new_tokens += caption.num_caption_tokens
            yield caption

    def _asked(self, request: Request) -> Request:
        """Return what the answer depends on."""
        if not self.settings.greedy:
            return request
        return replace(request, ref=replace(request.ref, key=""))

    def _prefill(self, requests: list[Request]) -> None:
        began = time.perf_counter()
        time.sleep(self.settings.vision * len(requests))
        seen = time.perf_counter()
        time.sleep(self.settings.prefill)
        self.counters.vision_seconds += seen - began
        self.counters.prefill_seconds += time.perf_counter() - seen
        longest = max(len(one.prompt_ids) for one in requests)
        num_tokens = sum(len(one.prompt_ids) for one in requests)
        self.counters.prefills += 1
        self.counters.prompt_tokens += num_tokens
        self.counters.padding_tokens += longest * len(requests) - num_tokens


def answer(request: Request, caption_index: int) -> Caption:
    """Return the one caption that this request has at this index, whoever asks and when."""
    seed = f"{request.ref.key}\0{request.facts.sha256}\0{caption_index}\0{request.prompt_ids}"
    digest = hashlib.sha256(seed.encode("utf-8", "backslashreplace")).digest()
    number = int.from_bytes(digest[1:4], "big")
    text = f"a photo of {_THINGS[digest[0] % len(_THINGS)]}, number {number}"
    is_cut = digest[4] % 16 == 0
    return Caption(
        request,
        caption_index,
        text=text,
        finish_reason="length" if is_cut else "eos",
        num_prompt_tokens=len(request.prompt_ids),
        num_caption_tokens=4 + digest[5] % 12,
        mean_logprob=-digest[6] / 256,
    )


def _ids(prompt: str) -> tuple[int, ...]:
    return tuple(hashlib.sha256(word.encode()).digest()[0] for word in prompt.split())
