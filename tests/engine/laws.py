"""What the law tests share: one sequence alone without a cache, and the same through the engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.device import Device
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.sampling import Sampler
from pipeline.engine.sequence import Sequence, row_random
from pipeline.engine.stopping import StopRules
from pipeline.models.tiny import TinyModel
from pipeline.records import ImageFacts, ImageInputs, Request, SampleRef
from tests.engine.tape import LateDevice, TapedDevice

DEVICE = torch.device("cpu")
# How a device may be driven: tokens read at once or late, steps as they are or captured.
WAYS: dict[str, Callable[[], Device]] = {
    "at once": partial(Device, DEVICE),
    "late by 1": partial(LateDevice, DEVICE, 1),
    "late by 2": partial(LateDevice, DEVICE, 2),
    "captured": partial(TapedDevice, DEVICE, 0),
    "captured, late by 1": partial(TapedDevice, DEVICE, 1),
    "captured, late by 2": partial(TapedDevice, DEVICE, 2),
}
MODEL = TinyModel().double().eval()
EOS = frozenset({10, 33, 58})  # ids that this network is fond of: captions end early and late


@dataclass(frozen=True)
class Settings:
    """How an engine is set up for one example."""

    slots: int = 4
    prefill_batch: int = 3
    max_new_tokens: int = 12
    sampling: SamplingSettings | None = None
    device: Callable[[], Device] = WAYS["at once"]

    def for_sampling(self) -> SamplingSettings:
        return self.sampling or SamplingSettings(max_new_tokens=self.max_new_tokens)


def make_request(index: int, text_ids: Rows[int], num_tiles: int = 0) -> Request:
    """Make a request whose image, of `num_tiles` tiles, stands before its text."""
    images = None
    if num_tiles:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (num_tiles, 3, 4, 4), generator=generator)
        images = ImageInputs(pixels.to(torch.uint8))
    return Request(
        ref=SampleRef("shard", index, f"key{index}", f"key{index}.png"),
        facts=ImageFacts(),
        prompt_ids=(*[MODEL.image_token_id] * num_tiles, *text_ids),
        images=images,
    )


def rules_of(settings: Settings, eos: frozenset[int] = EOS) -> StopRules:
    return StopRules(eos_ids=eos, max_new_tokens=settings.max_new_tokens)


_known: dict[tuple[object, ...], list[int]] = {}


def alone(
    request: Request, settings: Settings, caption_index: int = 0, eos: frozenset[int] = EOS
) -> list[int]:
    """The tokens of one sequence by itself: no batch, no padding, no cache.

    They are computed once: seeded mistakes and networks that fail are for the engine alone.
    """
    sampling = (settings.for_sampling(), settings.max_new_tokens)
    what = (request.ref.index, request.prompt_ids, *sampling, caption_index, eos)
    if what not in _known:
        _known[what] = _alone(request, settings, caption_index, eos)
    return _known[what]


@torch.inference_mode()
def _alone(
    request: Request, settings: Settings, caption_index: int, eos: frozenset[int]
) -> list[int]:
    sampling = settings.for_sampling()
    rules, sampler = rules_of(settings, eos), Sampler(sampling, eos)
    numbers = row_random(sampling.seed, request.ref.key, caption_index)
    sequence = Sequence(request, caption_index, numbers)
    features = MODEL.encode_images([request.images])[0] if request.images else None
    while not sequence.is_finished:
        ids = torch.tensor([[*request.prompt_ids, *sequence.token_ids]])
        length = ids.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        logits = MODEL.next_logits(ids, features, positions, mask, None)
        (token,), (logprob,) = sampler.choose(logits, [sequence])
        sequence.append(token, logprob)
        sequence.finish_reason = rules.finish_reason(sequence.token_ids)
    return sequence.token_ids


def make_engine(settings: Settings, eos: frozenset[int] = EOS) -> Engine:
    shape = EngineShape(settings.slots, settings.prefill_batch, 40, torch.float64, DEVICE)
    rules = rules_of(settings, eos)
    return Engine(MODEL, shape, settings.for_sampling(), rules, device=settings.device())


def through_engine(
    requests: Rows[Request], settings: Settings, eos: frozenset[int] = EOS
) -> list[Sequence]:
    """Feed requests as the backend does, a few at a time, until all have ended."""
    engine = make_engine(settings, eos)
    ended: list[Sequence] = []
    waiting = list(requests)
    for _ in range(10_000):
        while waiting and engine.num_wanted:
            engine.submit(waiting.pop(0))
        if not waiting:
            engine.close()
        if engine.is_idle:
            engine.check_integrity()
            return ended
        ended += engine.step()
    raise AssertionError("the engine does not come to an end")


def assert_batch_equals_alone(
    requests: Rows[Request], settings: Settings, eos: frozenset[int] = EOS
) -> None:
    """Laws 1 and 2: the tokens of a sequence alone, and exactly one answer a caption."""
    ended = through_engine(requests, settings, eos)
    answers = {(s.request.ref.index, s.caption_index): s.token_ids for s in ended}
    assert len(answers) == len(ended), "a caption was answered twice"
    for request in requests:
        for caption_index in range(settings.for_sampling().num_captions):
            found = answers.pop((request.ref.index, caption_index))
            assert found == alone(request, settings, caption_index, eos)
    assert not answers, "an answer that nobody asked for"
