"""Models that our own engine runs, found and recognised before their weights are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from PIL import Image
from torch import nn

from pipeline.backends.calibration import calibration_inputs
from pipeline.backends.native import NativeCaptioner
from pipeline.backends.placement import Placement
from pipeline.backends.threads import choose_threads, is_small_network
from pipeline.captioner import Ready, SamplingSettings, SpeedSettings
from pipeline.errors import CheckpointError
from pipeline.freed_memory import trim
from pipeline.models.quantising import quantise, vision_towers
from pipeline.models.vlm import CaptionModel
from pipeline.processors.processor import Processor
from pipeline.records import ImageFacts, SampleRef

TRIAL = SamplingSettings(max_new_tokens=4, max_text_tokens=16)
TRIAL_SPEED = SpeedSettings(slots=4, prefill_batch=4)
MAX_ERROR = 0.25  # of image features in 8 bits, over their size; of random networks it is 0.04


@dataclass(frozen=True, slots=True)
class NativeSource:
    """A checkpoint of a native family; `build` reads the weights onto a placement."""

    name: str
    family: str
    weights_sha256: str
    processor: Processor
    placement: Placement
    build: Callable[[Placement], CaptionModel]
    backend: str = field(default="native", init=False)

    @property
    def default_prompt(self) -> str:
        """The family's own prompt."""
        return self.processor.default_prompt

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What identifies the model in `_job.json`."""
        quantize = self.placement.quantize  # only where it is chosen, as for jobs before it
        return {
            "model": self.name,
            "family": self.family,
            "backend": self.backend,
            "weights_sha256": self.weights_sha256,
            "dtype": self.placement.dtype_name,
            **({} if quantize == "none" else {"quantize": quantize}),
        }

    def load(self, sampling: SamplingSettings, speed: SpeedSettings) -> NativeCaptioner:
        """Load the weights onto the device, and choose how many threads run them."""
        self.placement.enter()
        model = self.build(self.placement)
        is_small = is_small_network(model)
        done = self._quantise(model)
        captioner = NativeCaptioner(model, self.processor, self.placement, sampling, speed)
        trial = partial(caption_blanks, captioner.under(TRIAL, TRIAL_SPEED))
        threads = choose_threads(speed.threads, self.placement.device, trial, is_small=is_small)
        captioner.notices += [str(threads), *done]
        return captioner

    def _quantise(self, model: CaptionModel) -> list[str]:
        """Bring a network to what `--quantize` asks for; say what that was."""
        if self.placement.quantize == "none":
            return []
        assert isinstance(model, nn.Module), "every native network is one"
        towers = vision_towers(model)
        inputs = calibration_inputs(self.processor, towers[0].spec.image_size) if towers else []
        done = quantise(model, lambda: model.encode_images(inputs))
        trim()  # plain weights, and the photographs' activations, which are more
        if not done.error <= MAX_ERROR:  # nor where it is no number
            raise CheckpointError(
                f"--quantize int8 does not suit --model {self.name!r}: image features of example "
                f"pictures are off by {done.error:.0%}, at most {MAX_ERROR:.0%} is taken; "
                "wanted --quantize none"
            )
        return [str(done)]


def caption_blanks(captioner: NativeCaptioner) -> None:
    """Caption some blank pictures, to see how long that takes."""
    picture = Image.new("RGB", (256, 256), "grey")
    requests = [
        captioner.prepare(SampleRef("", i, str(i), ""), ImageFacts(), picture, "", {})
        for i in range(TRIAL_SPEED.slots)
    ]
    for _ in captioner.caption(Ready(requests)):
        pass


def default_source(device: str, dtype: str, quantize: str = "none") -> NativeSource:
    """Return the embedded model; `auto` is float32 here: it is small, and exactness is free."""
    from pipeline.models.default.model import WEIGHTS_PATH, load_default
    from pipeline.processors.default import DefaultProcessor

    def build(placement: Placement) -> CaptionModel:
        return load_default(placement.dtype).to(placement.device)

    return NativeSource(
        name="default",
        family="default",
        weights_sha256=file_sha256(WEIGHTS_PATH),
        processor=DefaultProcessor(),
        placement=Placement.choose(device, "float32" if dtype == "auto" else dtype, quantize),
        build=build,
    )


def file_sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
