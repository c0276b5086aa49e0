"""`CudaDevice` with a GPU's streams, events and graphs played by a processor.

What a GPU does with them is not tested here, but that they are used as torch asks for: a result is
read behind its own event, work is queued in between, a graph is captured on a stream of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from pipeline.engine import device as device_module
from pipeline.engine.device import CudaDevice, Device
from pipeline.records import EngineCounters, ImageInputs
from tests.engine.laws import DEVICE, Settings, assert_batch_equals_alone, make_engine, make_request
from tests.engine.tape import TapedDevice
from tests.engine.test_late import DRAWN, REQUESTS, answers, run


class FakeGPU:
    """The part of `torch.cuda` that the engine calls, and what was called."""

    def __init__(self) -> None:
        self.queued = itertools.count()
        self.calls: list[str] = []
        self.stream = self.main_stream = object()
        self.refuses = False
        self.graphs: list[FakeGraph] = []

    def set_stream(self, stream: object) -> None:
        self.stream = stream


class FakeEvent:
    gpu: FakeGPU

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.is_timed, self.place = enable_timing, -1
        assert enable_timing != blocking

    def record(self) -> None:
        assert self.gpu.stream is self.gpu.main_stream
        self.place = next(self.gpu.queued)

    def synchronize(self) -> None:
        assert self.place >= 0, "an event that was never recorded is over at once"
        self.gpu.calls.append("wait")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.is_timed
        assert end.is_timed
        return 1000.0 * (end.place - self.place)


class FakeGraph:
    gpu: FakeGPU

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self.gpu.graphs.append(self)

    def replay(self) -> None:
        assert self.work is not None
        self.gpu.calls.append("replay")
        self.work()


class FakeCapture:
    """`torch.cuda.graph`: what runs within is taped, and does not run."""

    gpu: FakeGPU

    def __init__(self, graph: FakeGraph, pool: object, capture_error_mode: str) -> None:
        assert pool == "pool"
        assert capture_error_mode == "thread_local"
        self._graph = graph
        self._before = self.gpu.stream

    def __enter__(self) -> None:
        self.gpu.stream = object()

    def __exit__(self, *_: object) -> None:
        if self.gpu.refuses:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.gpu.stream = self._before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    fake = FakeGPU()
    for kind in (FakeEvent, FakeGraph, FakeCapture):
        monkeypatch.setattr(kind, "gpu", fake, raising=False)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.CUDAGraph", FakeGraph)
    monkeypatch.setattr("torch.cuda.graph", FakeCapture)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
    monkeypatch.setattr("torch.cuda.current_stream", lambda: fake.stream)
    monkeypatch.setattr("torch.cuda.set_stream", fake.set_stream)
    monkeypatch.setattr(device_module, "_pinned_like", torch.empty_like)
    return fake


class PlayedDevice(CudaDevice):
    """A CUDA device whose captured work is taped, since a fake graph records nothing itself."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        tape = TapedDevice(self.place, 1)
        replays: list[Callable[[], None]] = []
        replay = super().capture(lambda: replays.append(tape.capture(work)))
        self_graph: FakeGraph = replay.__self__  # type: ignore[attr-defined]
        self_graph.work = replays[0]
        return replay


def test_an_engine_on_it_has_the_captions_of_an_engine_that_waits(gpu: FakeGPU) -> None:
    settings = Settings(slots=6, sampling=DRAWN, device=partial(PlayedDevice, DEVICE))
    assert_batch_equals_alone(REQUESTS, settings)
    assert len(gpu.graphs) > 1
    assert gpu.calls.count("replay") > 10


def test_the_host_waits_for_a_step_once_the_next_is_queued(gpu: FakeGPU) -> None:
    engine = make_engine(Settings(device=partial(PlayedDevice, DEVICE)), eos=frozenset())
    engine.submit(make_request(0, [1, 2]))
    engine.close()
    engine.step()  # the prompt and a step are queued, and the prompt's token is read
    assert gpu.calls == ["wait"]
    engine.step()  # a step is queued, and the one before it is read
    assert gpu.calls == ["wait", "replay", "wait"]
    engine.step()
    assert gpu.calls[-2:] == ["replay", "wait"]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu: FakeGPU) -> None:
    gpu.refuses = True
    engine = make_engine(Settings(slots=4, device=partial(PlayedDevice, DEVICE)))
    found = answers(run(engine, REQUESTS))
    assert found == answers(run(make_engine(Settings(slots=4)), REQUESTS))
    assert len(engine.notices) == 1
    assert "operation not permitted when stream is capturing" in engine.notices[0]
    assert gpu.stream is gpu.main_stream
    assert len(gpu.graphs) == 1


def test_seconds_of_a_stage_are_the_gpus_own(gpu: FakeGPU) -> None:
    counters, cuda = EngineCounters(), CudaDevice(DEVICE)
    with cuda.stage(counters, "vision"):
        next(gpu.queued)
    with cuda.stage(counters, "decode"):
        read = cuda.fetch(torch.tensor([4, 5]), torch.tensor([-1.0, -2.0]))
    assert counters.vision_seconds == 0, "nobody has waited for it yet"
    assert read() == ([4, 5], [-1.0, -2.0])
    assert (counters.vision_seconds, counters.decode_seconds) == (2.0, 2.0)


def test_tokens_are_read_as_they_were_when_they_were_asked_for(gpu: FakeGPU) -> None:
    ids, logprobs = torch.tensor([4]), torch.tensor([-1.0])
    read = CudaDevice(DEVICE).fetch(ids, logprobs)
    ids.fill_(9)
    logprobs.fill_(0.0)
    assert read() == ([4], [-1.0])


def test_pixels_are_sent_ahead_unless_memory_is_short(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(0, [1], num_tiles=2)
    assert Device(DEVICE).upload_images(request) is request
    blind = make_request(0, [1])
    assert CudaDevice(DEVICE).upload_images(blind) is blind
    sent: list[torch.Tensor] = []

    def upload(host: torch.Tensor, place: torch.device) -> torch.Tensor:
        sent.append(host)
        return host.clone()

    monkeypatch.setattr(device_module, "upload", upload)
    there = CudaDevice(DEVICE).upload_images(request)
    assert isinstance(there.images, ImageInputs)
    assert isinstance(request.images, ImageInputs)
    assert there.images.pixels is not request.images.pixels
    assert sent[0] is request.images.pixels

    def is_full(host: torch.Tensor, place: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(device_module, "upload", is_full)
    assert CudaDevice(DEVICE).upload_images(request) is request


def test_a_gpu_is_driven_as_one(gpu: FakeGPU) -> None:
    assert isinstance(Device.of(torch.device("cuda", 1)), CudaDevice)
    assert type(Device.of(DEVICE)) is Device
    assert type(Device.of(torch.device("mps"))) is Device


def test_copies_to_a_gpu_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch here has no CUDA: what is called is looked at."""
    calls: list[object] = []

    def pinned(self: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return self

    def to(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append((args, kwargs))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda = torch.device("cuda", 0)
    device_module.upload(torch.zeros(1), cuda)
    assert calls == ["pinned", ((cuda,), {"non_blocking": True})]


class Buffer:
    """A tensor on a GPU, as far as it is filled."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getitem__(self, rows: slice) -> Buffer:
        self.calls.append(rows)
        return self

    def copy_(self, host: object, *, non_blocking: bool) -> None:
        self.calls += [host, non_blocking]


def test_buffers_are_filled_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.tolist())  # a mark
    buffer = Buffer()
    device_module.refill(buffer, torch.tensor([3, 4]))  # type: ignore[arg-type]
    assert buffer.calls == [slice(None, 2), [3, 4], True]
