"""One request's life in the engine: waiting, live in a slot, finished."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace

from torch import Tensor

from pipeline.errors import SampleError
from pipeline.records import Request


def row_random(seed: int, key: str, caption_index: int) -> random.Random:
    """Return the random numbers of one caption: its own, whatever runs beside it."""
    name = f"{seed}\0{caption_index}\0{key}".encode("utf-8", "surrogatepass")
    return random.Random(int.from_bytes(hashlib.sha256(name).digest()[:16], "big"))


@dataclass(slots=True, eq=False)
class Sequence:
    """A caption being made: the tokens so far, and where its keys and values lie."""

    request: Request
    caption_index: int
    random: random.Random
    num_siblings: int = 0  # further captions of the request, to be copied from this one's slot
    features: Tensor | None = None  # `[F, C]` of its images, in place of their pixels
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    sum_logprob: float = 0.0
    finish_reason: str | None = None
    error: SampleError | None = None
    _uniform: float | None = None

    @property
    def is_finished(self) -> bool:
        """True once no further token will come."""
        return self.finish_reason is not None or self.error is not None

    def keep_features(self, features: Tensor) -> None:
        """Take what the vision tower made of the images, whose pixels are not needed any more."""
        self.features = features
        self.request = replace(self.request, images=None)

    def uniform(self) -> float:
        """Return the next token's random number: the same one until that token is appended."""
        if self._uniform is None:
            self._uniform = self.random.random()
        return self._uniform

    def append(self, token: int, logprob: float) -> None:
        """Take the next token of the caption."""
        self.token_ids.append(token)
        self.sum_logprob += logprob
        self._uniform = None

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What a prefill must run: the prompt, and the caption so far if it was preempted."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def num_prefix_tokens(self) -> int:
        """How many tokens a prefill of this sequence runs."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt columns without padding, image places included."""
        return len(self.request.prompt_ids)

    @property
    def mean_logprob(self) -> float | None:
        """Mean natural-log probability of the caption's tokens, its end token included."""
        return self.sum_logprob / len(self.token_ids) if self.token_ids else None
