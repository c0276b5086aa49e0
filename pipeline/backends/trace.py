"""Where two captions of one request part, and how close the network's choice was there.

The caption is walked token by token, uncached and alone. At each place the likeliest token that
goes on with the one text, and the likeliest that goes on with the other, are looked up; the
first place where these are not the same token is where the captions part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.backends.native import NativeCaptioner
from pipeline.captioner import Captioner
from pipeline.records import Request

MAX_CANDIDATES = 200


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token, by its place from 0, in which two captions differ, with both logits."""

    place: int
    stored: str
    fresh: str
    stored_logit: float
    fresh_logit: float

    @property
    def gap(self) -> float:
        """How far the two logits are apart; 0 is a tie."""
        return abs(self.fresh_logit - self.stored_logit)


def first_difference(
    captioner: Captioner, request: Request, stored: str, fresh: str, max_tokens: int
) -> TokenDifference | None:
    """Return where the two captions part; None if the backend shows no logits, or they do not."""
    if not isinstance(captioner, NativeCaptioner) or stored == fresh:
        return None
    return _Trace(captioner, request).walk(stored, fresh, max_tokens)


class _Trace:
    """One request, run through the network again at each token."""

    def __init__(self, captioner: NativeCaptioner, request: Request) -> None:
        self._model = captioner._model
        self._processor = captioner._processor
        self._device = captioner._placement.device
        self._request = request

    @torch.inference_mode()
    def walk(self, stored: str, fresh: str, max_tokens: int) -> TokenDifference | None:
        """Return the first place at which the likeliest tokens of the two texts differ."""
        images = self._request.images
        features = None if images is None else torch.cat(self._model.encode_images([images]))
        ids: list[int] = []
        for place in range(max_tokens):
            logits = self._logits(ids, features)
            order = torch.topk(logits, min(MAX_CANDIDATES, len(logits))).indices.tolist()
            one, other = self._next(order, ids, stored), self._next(order, ids, fresh)
            if one is None or other is None:
                return None
            if one != other:
                stored_logit, fresh_logit = logits[one].item(), logits[other].item()
                return TokenDifference(
                    place, self._shown(one), self._shown(other), stored_logit, fresh_logit
                )
            if one in self._processor.eos_ids:
                return None
            ids.append(one)
        return None

    def _logits(self, ids: Sequence[int], features: torch.Tensor | None) -> torch.Tensor:
        row = torch.tensor([[*self._request.prompt_ids, *ids]], device=self._device)
        length = row.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=self._device).tril()
        positions = torch.arange(length, device=self._device)[None]
        return self._model.next_logits(row, features, positions, mask[None, None], None)[0].float()

    def _next(self, order: Sequence[int], ids: Sequence[int], text: str) -> int | None:
        """Return the likeliest token after which `text` can still come."""
        before = self._text(ids)
        for token in order:
            if token in self._processor.eos_ids:
                if before.strip() == text:
                    return token
            elif _goes_on(before, self._text([*ids, token]), text):
                return token
        return None

    def _text(self, ids: Sequence[int]) -> str:
        return self._processor.detokenise(ids).lstrip()

    def _shown(self, token: int) -> str:
        is_end = token in self._processor.eos_ids
        return "the end" if is_end else self._processor.detokenise([token])


def _goes_on(before: str, after: str, text: str) -> bool:
    """Whether a token, which makes `after` of `before`, is a step towards `text`."""
    if before.strip() == text:
        return False  # only the end token can follow: blanks at the end are in no caption
    if after.endswith("\ufffd"):  # a piece of a character: the next token shows which
        return text.startswith(after.rstrip("\ufffd"))
    return text.startswith(after) and (len(after) > len(before) or not after)
