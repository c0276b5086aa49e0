"""One request's life in the engine: waiting, live in a slot, finished."""

from __future__ import annotations

import hashlib
import random
from collections import deque
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
    seed: int = 0  # of the job
    num_chosen: int = 0  # tokens that the device has chosen; `token_ids` are those the host knows
    _uniforms: deque[float] = field(default_factory=deque)  # of the tokens not yet read

    @classmethod
    def begin(cls, request: Request, caption_index: int, seed: int) -> Sequence:
        """Begin a caption of a request, with random numbers of its own."""
        numbers = row_random(seed, request.ref.key, caption_index)
        return cls(request, caption_index, numbers, seed=seed)

    def siblings(self) -> list[Sequence]:
        """Begin the further captions of the request."""
        siblings = []
        for caption_index in range(1, 1 + self.num_siblings):
            sibling = Sequence.begin(self.request, caption_index, self.seed)
            sibling.features = self.features  # for a prefill of its own, if it loses its slot
            siblings.append(sibling)
        return siblings

    def fail(self, code: str, detail: str) -> list[Sequence]:
        """End a sequence that holds no slot in an error, and its siblings with it: all of them."""
        family = [self, *self.siblings()]
        for each in family:
            each.error = SampleError(code, detail)
        return family

    @property
    def is_finished(self) -> bool:
        """True once no further token will come."""
        return self.finish_reason is not None or self.error is not None

    def keep_features(self, features: Tensor) -> None:
        """Take what the vision tower made of the images, whose pixels are not needed any more."""
        self.features = features
        self.request = replace(self.request, images=None)

    def uniform(self) -> float:
        """Return the next token's random number: the same one until that token is chosen."""
        num_ahead = self.num_chosen - len(self.token_ids)
        while len(self._uniforms) <= num_ahead:
            self._uniforms.append(self.random.random())
        return self._uniforms[num_ahead]

    def append(self, token: int, logprob: float) -> None:
        """Take the next token of the caption."""
        self.token_ids.append(token)
        self.sum_logprob += logprob
        if self.num_chosen < len(self.token_ids):
            self.num_chosen = len(self.token_ids)
        if self._uniforms:
            self._uniforms.popleft()

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
