"""The types that flow between the stages, frozen; each is made by one stage and read by the next.

    Shard -> Sample -> Request -> Caption -> Row

A sample that cannot be captioned becomes an error `Row` where it fails. The only type here
that changes is `EngineCounters`, whose numbers only ever grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipeline.errors import SampleError

STATUSES = ("ok", "truncated", "repetition", "error")
FINISH_REASONS = ("eos", "length", "stop", "repetition")
STATUS_OF_FINISH = {
    "eos": "ok",
    "stop": "ok",
    "length": "truncated",
    "repetition": "repetition",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a Parquet file that the user chose; None: the file's schema tells."""

    image: str | None = None
    key: str | None = None  # None: a key is the number of its row


@dataclass(frozen=True, slots=True)
class Shard:
    """An input file, and the stable `id` that names its output.

    A part of a folder of pictures is one too: `pictures` are its files, each a path below
    `folder` with those of its fields behind it.
    """

    id: str
    url: str
    size: int | None = None  # bytes, where the file system or the store tells
    command: tuple[str, ...] | None = None  # that writes it, where the user allowed one
    columns: Columns = Columns()
    folder: str | None = None
    pictures: tuple[tuple[str, ...], ...] | None = None
    address: str | None = field(default=None, repr=False)  # to ask, where `url` hides a secret
    stamp: tuple[int, int] | None = None  # of a remote one, as it was when it was listed


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample stands: its shard's id, its place among the image members, key and member."""

    shard: str
    index: int
    key: str
    member: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One image member of a shard with the other members (fields) of the same key.

    Where the member holds no bytes that can be opened (a link, one over the size limit), `fault`
    says why and `data` is empty; such a sample becomes an error row like any other bad image.
    """

    ref: SampleRef
    data: bytes
    fields: Mapping[str, bytes] = field(default_factory=dict)  # extension -> raw bytes
    fault: SampleError | None = None


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What the bytes of an image say of themselves; zeros and blanks where they say nothing.

    Of an image that was opened, width and height are those of the upright picture. `note` says
    what was wrong with bytes that were opened nevertheless (`truncated: ...`).
    """

    width: int = 0
    height: int = 0
    format: str = ""
    sha256: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """An image made ready for a vision tower.

    `pixels` is `[I, 3, H, W]`, uint8 or float as the family wants it (I is the number of tiles);
    `patch_mask` is a bool `[I, H / patch, W / patch]` for families with padded tiles.
    """

    pixels: torch.Tensor
    patch_mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A sample made ready for the network; `kept` are the pass-through columns of its row."""

    ref: SampleRef
    facts: ImageFacts
    prompt_ids: tuple[int, ...]
    images: ImageInputs | None = None
    kept: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caption:
    """The answer to a request: one for each caption index, with text, or with an error code."""

    request: Request
    caption_index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_caption_tokens: int = 0
    mean_logprob: float | None = None
    error: str | None = None
    error_detail: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the output, as DESIGN names its columns."""

    ref: SampleRef
    facts: ImageFacts
    status: str
    caption_index: int = 0
    caption: str | None = None
    error: str | None = None
    error_detail: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_caption_tokens: int = 0
    mean_logprob: float | None = None
    kept: Mapping[str, str | None] = field(default_factory=dict)
    is_copy: bool = False  # of an identical image's row; counted, and no column

    @classmethod
    def from_caption(cls, caption: Caption) -> Row:
        """Make the row of an answered request."""
        status = "error" if caption.error else STATUS_OF_FINISH[caption.finish_reason or ""]
        return cls(
            ref=caption.request.ref,
            facts=caption.request.facts,
            status=status,
            caption_index=caption.caption_index,
            caption=caption.text,
            error=caption.error,
            error_detail=caption.error_detail or caption.request.facts.note or None,
            finish_reason=caption.finish_reason,
            num_prompt_tokens=caption.num_prompt_tokens,
            num_caption_tokens=caption.num_caption_tokens,
            mean_logprob=caption.mean_logprob,
            kept=caption.request.kept,
        )


@dataclass(slots=True)
class EngineCounters:
    """What the network has done so far; every number only grows, seconds are wall time.

    A token that a sequence ran past its end (`pipeline.engine.in_flight`) is no new token, and its
    slot was not busy; the step counts. Seconds of vision, prefill and decode are the device's.
    """

    prompt_tokens: int = 0
    padding_tokens: int = 0
    new_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    busy_slot_steps: int = 0
    total_slot_steps: int = 0
    vision_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    waiting_seconds: float = 0.0
