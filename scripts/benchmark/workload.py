"""Requests with captions of known lengths, and what a contender says of having answered them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Protocol

import torch

from pipeline.records import ImageFacts, ImageInputs, Request, SampleRef
from scripts.benchmark.shapes import NetworkShape

MAX_NEW_TOKENS = 256
MEDIAN_LENGTH = 40
LENGTH_SPREAD = 0.8  # of the logarithm: one caption in a hundred would be longer than 256 tokens
MIN_TEXT, MAX_TEXT = 16, 48


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in job order, the caption length of each, and the greatest length allowed."""

    shape: NetworkShape
    requests: tuple[Request, ...]
    lengths: tuple[int, ...]
    max_new_tokens: int

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of all captions."""
        return sum(self.lengths)

    def subset(self, num_images: int) -> Workload:
        """Return fewer requests whose lengths are spread alike: one of each quantile, in order."""
        if num_images >= len(self):
            return self
        by_length = sorted(range(len(self)), key=self.lengths.__getitem__)
        kept = set()
        for part in range(num_images):
            start = part * len(self) // num_images
            stratum = by_length[start : (part + 1) * len(self) // num_images]
            mean = sum(self.lengths[i] for i in stratum) / len(stratum)
            kept.add(min(stratum, key=lambda i: abs(self.lengths[i] - mean)))
        return self.pick(sorted(kept))

    def pick(self, places: Sequence[int]) -> Workload:
        """Return the requests at these places, in their order."""
        return Workload(
            self.shape,
            tuple(self.requests[i] for i in places),
            tuple(self.lengths[i] for i in places),
            self.max_new_tokens,
        )

    def without_pictures(self) -> Workload:
        """Return prompts of the same lengths, text in the places of pictures: for steps alone."""
        text = self.shape.ladder.end_id
        requests = tuple(
            replace(
                request,
                images=None,
                prompt_ids=tuple(
                    text if token == self.shape.image_token_id else token
                    for token in request.prompt_ids
                ),
            )
            for request in self.requests
        )
        return replace(self, requests=requests)

    def renumbered(self) -> Workload:
        """Return the same requests with indices that count from 0."""
        requests = tuple(
            replace(request, ref=replace(request.ref, index=index))
            for index, request in enumerate(self.requests)
        )
        return replace(self, requests=requests)

    def shortened(self, max_new_tokens: int) -> Workload:
        """Return the same requests with another greatest length."""
        return replace(self, max_new_tokens=max_new_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender made of a workload: tokens by request index, and its own counts."""

    tokens: dict[int, tuple[int, ...]]
    seconds: float
    counts: dict[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """Someone who captions a workload; weights are loaded before, pictures are in memory."""

    name: str

    def run(self, workload: Workload) -> Outcome:
        """Answer every request."""
        ...


def make_workload(
    shape: NetworkShape, num_images: int, *, is_skewed: bool, seed: int = 0
) -> Workload:
    """Make pictures of noise and prompts of random text, each ending on its caption's rung."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    longest = min(MAX_NEW_TOKENS, shape.ladder.steps)
    lengths = skewed_lengths(num_images, longest) if is_skewed else [min(64, longest)] * num_images
    rng.shuffle(lengths)
    side = shape.vision.image_size
    requests = []
    for index, length in enumerate(lengths):
        # Large patches as well as noise: towers see differences between pictures.
        coarse = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8, generator=generator)
        pixels = coarse.repeat_interleave(side // 4, 2).repeat_interleave(side // 4, 3)
        pixels ^= torch.randint(0, 64, pixels.shape, dtype=torch.uint8, generator=generator)
        text = rng.choices(
            range(shape.ladder.end_id, shape.image_token_id)
            if shape.image_token_id > shape.ladder.end_id
            else range(shape.ladder.end_id, shape.decoder.vocab_size),
            k=rng.randint(MIN_TEXT, MAX_TEXT) - 1,
        )
        last = shape.ladder.token(length, rng.randrange(shape.ladder.tracks))
        prompt = (*([shape.image_token_id] * shape.num_image_tokens), *text, last)
        ref = SampleRef("bench", index, f"{index:06d}", f"{index:06d}.png")
        requests.append(Request(ref, ImageFacts(side, side), prompt, ImageInputs(pixels)))
    return Workload(shape, tuple(requests), tuple(lengths), longest)


def skewed_lengths(num_images: int, longest: int) -> list[int]:
    """Return log-normal lengths, median 40 of 256, one of each quantile: the same for any seed."""
    median = MEDIAN_LENGTH * longest / MAX_NEW_TOKENS
    normal = NormalDist(math.log(median), LENGTH_SPREAD)
    drawn = (math.exp(normal.inv_cdf((i + 0.5) / num_images)) for i in range(num_images))
    return [max(2, min(longest, round(length))) for length in drawn]


def left_padded(requests: Sequence[Request], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts on the left: ids and mask, int64 `[B, T]`, as static batches have them."""
    columns = max(len(request.prompt_ids) for request in requests)
    ids = torch.full((len(requests), columns), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        length = len(request.prompt_ids)
        ids[row, columns - length :] = torch.tensor(request.prompt_ids)
        mask[row, columns - length :] = 1
    return ids, mask


def scaled_pixels(shape: NetworkShape, requests: Sequence[Request]) -> torch.Tensor:
    """Return the float32 pixels `[B, 3, S, S]` that the family's own processor would give.

    B is 0 where the requests have no pictures.
    """
    side = shape.vision.image_size
    pictures = [request.images.pixels for request in requests if request.images is not None]
    empty = torch.empty(0, 3, side, side, dtype=torch.uint8)
    return shape.pixel_scale(torch.cat([empty, *pictures]))


def until_end(tokens: Sequence[int], eos_id: int, longest: int) -> tuple[int, ...]:
    """Cut a row after its end token; rows of a static batch are padded behind it."""
    row = list(tokens[:longest])
    return tuple(row[: row.index(eos_id) + 1] if eos_id in row else row)
