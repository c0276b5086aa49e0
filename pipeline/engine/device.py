"""What differs between a processor and a GPU: when results are there, and how numbers cross over.

On a processor a call returns with its result. A GPU runs behind the host: a call only queues work.
Asking for a result waits until everything queued before it is done, while nothing new is queued,
and so does a copy from ordinary host memory. `CudaDevice` therefore reads tokens a step late, and
copies through pinned memory, which the GPU fetches by itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from pipeline.engine.memory import is_out_of_memory
from pipeline.records import EngineCounters, Request

Chosen = tuple[list[int], list[float]]  # ids and log probabilities


class Device:
    """A device whose results are there when a call returns, or that waits for each.

    `lag` is how many prefills and steps may run before the host reads the tokens of the first
    of them.
    """

    lag = 0

    def __init__(self, place: torch.device) -> None:
        self.place = place

    @staticmethod
    def of(place: torch.device) -> Device:
        """Return the ways of a device of torch's."""
        return CudaDevice(place) if place.type == "cuda" else Device(place)

    def upload_images(self, request: Request) -> Request:
        """Bring a request's pixels over before their turn, where they can travel meanwhile."""
        return request

    def fetch(self, ids: Tensor, logprobs: Tensor) -> Callable[[], Chosen]:
        """Return what reads `[B]` ids and log probabilities as they are now, later."""
        found = ids.tolist(), logprobs.tolist()
        return lambda: found

    @contextmanager
    def stage(self, counters: EngineCounters, name: str) -> Iterator[None]:
        """Add the seconds that a stage takes to `{name}_seconds`."""
        began = time.perf_counter()
        yield
        _add_seconds(counters, name, time.perf_counter() - began)


def _event(*, enable_timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing, blocking)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A stage's first and last moment on a GPU, once it gets there."""

    counters: EngineCounters
    name: str
    begin: torch.cuda.Event = field(default_factory=partial(_event, enable_timing=True))
    end: torch.cuda.Event = field(default_factory=partial(_event, enable_timing=True))

    @property
    def is_over(self) -> bool:
        """True once the GPU has passed the last moment."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]


class CapturingDevice(Device, ABC):
    """A device that can record work: decode steps run over fixed memory, see `StaticDecoder`."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` would do, without doing it; return what does it, over and over.

        Raises RuntimeError where that is not possible.
        """


class CudaDevice(CapturingDevice):
    """An NVIDIA GPU (or one of AMD's under torch's name for both), one stream, one step ahead.

    All work is on the current stream, so it happens in the order in which it was queued: a slot
    that is taken again is written after the last step that read it, and pinned memory is used
    again by torch after the copy that needs it. Pixels have no stream of their own: over a bus
    of 25 GB/s, 0.8 MB would take a thirtieth of a millisecond (reckoned, not measured).
    """

    lag = 1

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self._timed: deque[_Timed] = deque()
        self._pool = torch.cuda.graph_pool_handle()

    def upload_images(self, request: Request) -> Request:
        """Send pixels ahead, while earlier steps run; where memory is short, leave them."""
        images = request.images
        if images is None:
            return request
        mask = images.patch_mask
        try:
            there = replace(
                images,
                pixels=upload(images.pixels, self.place),
                patch_mask=None if mask is None else upload(mask, self.place),
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return request  # the network brings them over itself, and halves its batch if it must
        return replace(request, images=there)

    def fetch(self, ids: Tensor, logprobs: Tensor) -> Callable[[], Chosen]:
        """Let ids and log probabilities follow the work queued so far; reading waits for them."""
        host_ids, host_logprobs = _pinned_like(ids), _pinned_like(logprobs)
        host_ids.copy_(ids, non_blocking=True)
        host_logprobs.copy_(logprobs, non_blocking=True)
        # Blocking: the host sleeps meanwhile, and leaves its core to the loaders.
        is_there = _event(blocking=True)
        is_there.record()

        def read() -> Chosen:
            is_there.synchronize()
            self._collect()
            return host_ids.tolist(), host_logprobs.tolist()

        return read

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph; all of them share the memory of what they compute in between."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        finally:
            # A capture that fails leaves its own stream behind as the current one.
            torch.cuda.set_stream(stream)
        return graph.replay

    @contextmanager
    def stage(self, counters: EngineCounters, name: str) -> Iterator[None]:
        """Time a stage where it runs: on the host it is only queued."""
        timed = _Timed(counters, name)
        timed.begin.record()
        yield
        timed.end.record()
        self._timed.append(timed)

    def _collect(self) -> None:
        while self._timed and self._timed[0].is_over:
            timed = self._timed.popleft()
            seconds = timed.begin.elapsed_time(timed.end) / 1000
            _add_seconds(timed.counters, timed.name, seconds)


def upload(host: Tensor, place: torch.device) -> Tensor:
    """Return a host tensor's copy on a device, there before whatever is queued from now on.

    The GPU would wait for a copy from ordinary memory. Torch keeps the pinned block until the
    copy is over, and then uses it again.
    """
    if place.type == "cuda":
        return host.pin_memory().to(place, non_blocking=True)
    return host.to(place)


def refill(buffer: Tensor, host: Tensor) -> None:
    """Copy a host tensor into the first rows of one on a device, as `upload` does."""
    if buffer.device.type == "cuda":
        host = host.pin_memory()
    buffer[: len(host)].copy_(host, non_blocking=True)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _add_seconds(counters: EngineCounters, name: str, seconds: float) -> None:
    setattr(counters, f"{name}_seconds", getattr(counters, f"{name}_seconds") + seconds)
