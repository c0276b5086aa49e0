"""The Python door: captions of pictures at hand, without shards or files.

from pipeline import load_captioner
load_captioner("default").caption(["cat.jpg", picture])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.backends.resolve import resolve
from pipeline.captioner import Captioner, SamplingSettings, SpeedSettings
from pipeline.errors import SampleError
from pipeline.images.opening import ImageSettings, facts_of, open_image
from pipeline.records import ImageFacts, Request, SampleRef

if TYPE_CHECKING:
    from PIL import Image

    Picture = str | os.PathLike[str] | bytes | Image.Image


class Captions:
    """A network with its weights loaded, for pictures in memory or in files."""

    def __init__(self, captioner: Captioner, prompt: str, images: ImageSettings) -> None:
        """Caption with this prompt; use `load_captioner` to get one."""
        self._captioner = captioner
        self._prompt = prompt
        self._images = images

    def caption(self, pictures: Sequence[Picture], *, prompt: str | None = None) -> list[str]:
        """Return a caption for each picture, in their order: paths, bytes, or PIL images.

        Raises SampleError, naming the place of the picture, where one cannot be captioned.
        """
        prepared = (self._prepare(place, one, prompt) for place, one in enumerate(pictures))
        requests = _Requests(prepared)
        texts: dict[int, str] = {}
        for caption in self._captioner.caption(requests):
            place = caption.request.ref.index
            if caption.error is not None:
                raise SampleError(caption.error, f"picture {place}: {caption.error_detail}")
            texts.setdefault(place, caption.text or "")
        return [texts[place] for place in range(len(pictures))]

    def _prepare(self, place: int, picture: Picture, prompt: str | None) -> Request:
        ref = SampleRef("", place, str(place), str(place))
        try:
            image, facts = self._open(picture)
            return self._captioner.prepare(ref, facts, image, prompt or self._prompt, {})
        except SampleError as error:
            raise SampleError(error.code, f"picture {place}: {error.detail}") from None

    def _open(self, picture: Picture) -> tuple[Image.Image, ImageFacts]:
        if isinstance(picture, bytes):
            return open_image(picture, self._images)
        if isinstance(picture, (str, os.PathLike)):
            try:
                return open_image(Path(picture).read_bytes(), self._images)
            except OSError as error:
                raise SampleError("unreadable", f"{picture}: {error.strerror}") from None
        data = picture.convert("RGB").tobytes()
        facts = ImageFacts(picture.width, picture.height, sha256=facts_of(data).sha256)
        return picture.convert("RGB"), facts


class _Requests:
    """Requests made as they are asked for."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self.is_exhausted = False

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return the next requests; fewer only at the end."""
        taken: list[Request] = []
        while len(taken) < max_requests:
            request = next(self._requests, None)
            if request is None:
                self.is_exhausted = True
                break
            taken.append(request)
        return taken


def load_captioner(
    model: str = "default",
    *,
    prompt: str | None = None,
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    system: str | None = None,
    sampling: SamplingSettings | None = None,
    speed: SpeedSettings | None = None,
    images: ImageSettings | None = None,
) -> Captions:
    """Load a network: `default`, a checkpoint's folder, or a hub id.

    Raises CheckpointError or RequestError, in one line, where that cannot be done.
    """
    source = resolve(
        model, backend=backend, dtype=dtype, device=device, quantize=quantize, system=system
    )
    captioner = source.load(
        sampling or SamplingSettings(),
        speed or SpeedSettings(slots=16, device=device),
    )
    return Captions(captioner, prompt or source.default_prompt, images or ImageSettings())
