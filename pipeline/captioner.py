"""The seam between the job and the networks: requests in, captions out.

The job knows nothing of tensors, a backend knows nothing of shards, rows or the terminal.
`pipeline.backends` holds the implementations: `native` (our engine), `transformers` (anything
that library loads) and `scripted` (fixed answers, for tests of the job around it).

    source = resolve(model)         # cheap: no weights yet; a wrong folder fails here
    captioner = source.load(settings)
    request = captioner.prepare(...)        # on loader threads
    for caption in captioner.caption(queue_of_requests): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.errors import RequestError
from pipeline.records import Caption, EngineCounters, ImageFacts, Request, SampleRef

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are chosen; greedy at temperature 0. These shape captions.

    A sampled token depends on (seed, key, caption index, place in the caption) and on the
    network's answer alone, never on batch, slots, workers or order.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    repetition_penalty: float = 1.0
    num_captions: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_text_tokens: int = 512  # room for a prompt beside its image tokens; longer: an error row
    max_repeats: int = 4  # a caption that says the same thing so often in a row ends; 0: off

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 1, "max-new-tokens", self.max_new_tokens, "1 or more"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min-new-tokens",
                self.min_new_tokens,
                f"0 to max-new-tokens ({self.max_new_tokens})",
            ),
            (0 <= self.temperature <= 100, "temperature", self.temperature, "0 to 100"),
            (0 < self.top_p <= 1, "top-p", self.top_p, "above 0, at most 1"),
            (self.top_k >= 0, "top-k", self.top_k, "0 (off) or more"),
            (
                0 < self.repetition_penalty <= 100,
                "repetition-penalty",
                self.repetition_penalty,
                "above 0, at most 100",
            ),
            (self.max_text_tokens >= 1, "max-text-tokens", self.max_text_tokens, "1 or more"),
            (self.num_captions >= 1, "num-captions", self.num_captions, "1 or more"),
            (0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1"),
            (
                self.max_repeats == 0 or self.max_repeats >= 2,
                "max-repeats",
                self.max_repeats,
                "0 (off), or 2 or more",
            ),
            (all(self.stop), "stop", "an empty string", "at least one character"),
        )
        for is_right, name, found, wanted in checks:
            if not is_right:
                raise RequestError(f"--{name} is {found}; wanted {wanted}")
        if self.temperature == 0 and self.num_captions > 1:
            raise RequestError(
                f"--num-captions {self.num_captions} needs --temperature above 0: "
                "greedy captions of one image would all be the same"
            )
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise RequestError("--top-p and --top-k need --temperature above 0")


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How fast the same captions are made; none of these is in the job's fingerprint."""

    slots: int = 64
    prefill_batch: int = 16
    device: str = "auto"
    threads: int = 0  # 0: torch's own choice

    def __post_init__(self) -> None:
        for name, found, least in (
            ("slots", self.slots, 1),
            ("prefill-batch", self.prefill_batch, 1),
            ("threads", self.threads, 0),
        ):
            if found < least:
                raise RequestError(f"--{name} is {found}; wanted {least} or more")


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """The final prompt as the network gets it: text for people, ids as they are."""

    text: str
    ids: tuple[int, ...]


class RequestSource(Protocol):
    """Where a captioner pulls its requests from, so that a slow device holds back the reader."""

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return up to `max_requests` that are ready; with `block`, wait for at least one.

        An empty list after a blocking call means that no more will come.
        """
        ...

    @property
    def is_exhausted(self) -> bool:
        """True once no further request will ever come."""
        ...


@dataclass(slots=True)
class Ready:
    """Requests that are all there already, as a source."""

    requests: list[Request]

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return the next ones."""
        taken, self.requests = self.requests[:max_requests], self.requests[max_requests:]
        return taken

    @property
    def is_exhausted(self) -> bool:
        """True once all were taken."""
        return not self.requests


class Captioner(Protocol):
    """A network with its weights loaded."""

    @property
    def counters(self) -> EngineCounters:
        """What the network has done since it was loaded."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache takes, allocated once; 0 where that is not known."""
        ...

    @property
    def notices(self) -> list[str]:
        """What a person should be told of how it runs, such as memory that did not suffice."""
        ...

    def under(self, sampling: SamplingSettings, speed: SpeedSettings) -> Captioner:
        """Return the same network under other settings, its weights shared, its counters at 0."""
        ...

    def prepare(
        self,
        ref: SampleRef,
        facts: ImageFacts,
        image: Image.Image,
        prompt: str,
        kept: Mapping[str, str | None],
    ) -> Request:
        """Make an RGB image and a prompt ready for the network; safe on any thread.

        Raises SampleError where this one sample cannot be captioned.
        """
        ...

    def caption(self, source: RequestSource) -> Iterator[Caption]:
        """Answer each request exactly `num_captions` times, in whatever order they finish."""
        ...

    def preview(self, image: Image.Image, prompt: str) -> PromptPreview:
        """Show what `prepare` makes of a prompt."""
        ...


class ModelSource(Protocol):
    """A model that was found and recognised, its weights not yet loaded."""

    @property
    def family(self) -> str:
        """The family's name, such as `default` or `nanovlm`."""
        ...

    @property
    def backend(self) -> str:
        """`native`, `transformers` or `scripted`."""
        ...

    @property
    def default_prompt(self) -> str:
        """The prompt used where the user gives none."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What identifies the model in `_job.json`: name, family, weights' hash, dtype."""
        ...

    def load(self, sampling: SamplingSettings, speed: SpeedSettings) -> Captioner:
        """Load the weights onto the device."""
        ...
