"""Nothing makes the host wait for a device but the reading of tokens, nor mixes the two up.

The meta device stands in for a GPU: tensors there have no values, so whatever would ask for one
(`item`, `nonzero`, a mask as an index) is an error. A watch adds what the meta device lets pass:
operations on tensors of two places, and copies that do not go through `upload` or `refill`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.captioner import SamplingSettings
from pipeline.engine import padding
from pipeline.engine.device import CapturingDevice, Chosen, Device, upload
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.stopping import StopRules
from pipeline.models.idefics3 import Idefics3, Idefics3Spec
from pipeline.models.language import DecoderSpec
from pipeline.models.llava import Llava, LlavaSpec
from pipeline.models.nanovlm import Generation, NanoVLM, NanoVLMSpec
from pipeline.models.pixels import PixelScale
from pipeline.models.tiny import TinyModel
from pipeline.models.vision import VisionSpec
from pipeline.models.vlm import VisionLanguageModel
from pipeline.records import ImageFacts, ImageInputs, Request, SampleRef

META = torch.device("meta")
DECODER = DecoderSpec(2, 4, 2, 16, 64, 96, 256)
VISION = VisionSpec(32, 64, 2, 2, 32, 8)
CLIP = replace(VISION, has_class_token=True, drops_first=True, feature_layers=(1,))
IMAGE = 7


class Watch(TorchDispatchMode):
    """Refuses what a GPU would have to be asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        # A single number of the host's may take part anywhere: it goes along with the call.
        places = {one.device.type for one in given if one.dim() or one.device.type == "meta"}
        if len(places) > 1 and not _is_within("upload", "refill"):
            raise AssertionError(f"{func} is given tensors of {sorted(places)}")
        return out


def _is_within(*names: str) -> bool:
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name in names:
            return True
    return False


class MetaDevice(CapturingDevice):
    """A GPU that is not there: it answers with random tokens, a step late."""

    lag = 1

    def __init__(self) -> None:
        super().__init__(META)
        self._numbers = random.Random(0)

    def upload_images(self, request: Request) -> Request:
        images = request.images
        assert images is not None
        mask = images.patch_mask
        there = None if mask is None else upload(mask, META)
        return replace(request, images=ImageInputs(upload(images.pixels, META), there))

    def fetch(self, ids: Tensor, logprobs: Tensor) -> Callable[[], Chosen]:
        assert ids.device.type == logprobs.device.type == "meta"
        answer = [self._numbers.randrange(60) for _ in ids], [-1.0] * len(ids)
        return lambda: answer

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def tiles(num_tiles: int, side: int = 32) -> ImageInputs:
    return ImageInputs(torch.zeros(num_tiles, 3, side, side, dtype=torch.uint8))


def partly_padded() -> ImageInputs:
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    mask[:, 3:] = False
    return replace(tiles(1), patch_mask=mask)


def picture(height: int, width: int) -> ImageInputs:
    return ImageInputs(torch.zeros(1, 3, height, width, dtype=torch.uint8))


# A network, its pictures, and how many features each becomes.
Case = tuple[Callable[[], VisionLanguageModel], list[tuple[ImageInputs, int]]]
STANDARD = PixelScale.standardised(1 / 255, (0.5,) * 3, (0.5,) * 3)
SMOL = Idefics3Spec(replace(VISION, spreads_positions=True), DECODER, 2, IMAGE)
CASES: dict[str, Case] = {
    "tiny": (TinyModel, [(tiles(1), 1), (tiles(3), 3)]),
    "nanovlm": (
        lambda: NanoVLM(NanoVLMSpec(Generation.PLACEHOLDERS, VISION, DECODER, 2, IMAGE)),
        [(picture(32, 32), 4)],
    ),
    "nanovlm of tiles": (
        lambda: NanoVLM(NanoVLMSpec(Generation.TILES, VISION, DECODER, 2, IMAGE)),
        [(picture(32, 32), 4), (picture(64, 96), 28)],
    ),
    "idefics3": (lambda: Idefics3(SMOL, STANDARD), [(tiles(17), 68), (partly_padded(), 4)]),
    "llava": (
        lambda: Llava(LlavaSpec(CLIP, DECODER, IMAGE, "gelu", True), STANDARD),
        [(tiles(1), 16)],
    ),
}
SAMPLINGS = {
    "greedy": SamplingSettings(max_new_tokens=9),
    "with all settings": SamplingSettings(
        max_new_tokens=9,
        min_new_tokens=3,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.1,
        num_captions=2,
    ),
}


def answer_all(case: Case, sampling: SamplingSettings) -> int:
    """Run a job on the device that is not there; return how many captions ended under watch.

    A first round, unwatched, brings over what is brought over once: tables and the like.
    """
    build, pictures = case
    with META:
        model = build().eval()
    shape = EngineShape(4, 2, 80, torch.float32, META)
    rules = StopRules(frozenset({3, 5}), sampling.max_new_tokens)
    engine = Engine(model, shape, sampling, rules, device=MetaDevice())
    requests = [
        Request(
            SampleRef("", i, str(i), ""),
            ImageFacts(),
            (*[model.image_token_id] * num_features, *range(10, 13 + i % 4)),
            images,
        )
        for i, (images, num_features) in enumerate(pictures * 4)
    ]
    answer(engine, requests)
    with Watch():
        num_ended = answer(engine, requests)
    assert not engine.notices
    return num_ended


def answer(engine: Engine, requests: list[Request]) -> int:
    waiting, num_ended = list(requests), 0
    while waiting or not engine.is_idle:
        while waiting and engine.num_wanted:
            engine.submit(waiting.pop(0))
        num_ended += sum(sequence.error is None for sequence in engine.step())
    return num_ended


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("family", list(CASES))
def test_the_host_waits_for_nothing_but_tokens(family: str, sampling: str) -> None:
    case, settings = CASES[family], SAMPLINGS[sampling]
    assert answer_all(case, settings) == 4 * len(case[1]) * settings.num_captions


# -- Seeded mistakes.


def a_copy_goes_past_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the host's is copied from ordinary memory."""
    monkeypatch.setattr(padding, "upload", lambda host, place: host.to(place))


def a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks at the ids before they are there."""

    def fetch(self: Device, ids: Tensor, logprobs: Tensor) -> Callable[[], Chosen]:
        found = ids.tolist(), logprobs.tolist()
        return lambda: found

    monkeypatch.setattr(MetaDevice, "fetch", fetch)


def something_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of pixels is on the other side."""
    monkeypatch.setattr(PixelScale, "__call__", lambda self, pixels: self._table[0][pixels.int()])


@pytest.mark.parametrize(
    "mistake", [a_copy_goes_past_the_upload, a_token_is_asked_for, something_stays_behind]
)
def test_the_watch_catches_a_seeded_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        answer_all(CASES["nanovlm"], SAMPLINGS["greedy"])


def test_a_mask_as_an_index_has_no_shape_that_could_be_told() -> None:
    """What the meta device refuses is what a GPU would have to be asked."""
    with Watch(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META)[torch.zeros(3, dtype=torch.bool, device=META)]
