"""The native backend: every request answered, texts cut where they should be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.backends.native import NativeCaptioner
from pipeline.backends.placement import Placement, choose_device, choose_dtype
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.engine import engine
from pipeline.errors import JobError, RequestError
from pipeline.models.tiny import TinyModel
from pipeline.processors.tiny import TinyProcessor
from pipeline.records import Caption, ImageFacts, Request, SampleRef
from tests.backends.sources import ListSource

CPU64 = Placement(torch.device("cpu"), torch.float64)
MODEL = TinyModel().double().eval()


def captioner(
    sampling: SamplingSettings | None = None, speed: SpeedSettings | None = None
) -> NativeCaptioner:
    return NativeCaptioner(
        MODEL, TinyProcessor(), CPU64, sampling or SamplingSettings(), speed or SpeedSettings()
    )


def requests_of(made: NativeCaptioner, prompts: list[str]) -> list[Request]:
    return [
        made.prepare(
            SampleRef("shard", i, f"k{i}", f"k{i}.png"),
            ImageFacts(),
            Image.new("RGB", (8, 8), (40 * i % 255, 9 * i % 255, 77)),
            prompt,
            {},
        )
        for i, prompt in enumerate(prompts)
    ]


def answers(made: NativeCaptioner, source: ListSource) -> dict[tuple[int, int], Caption]:
    found = list(made.caption(source))
    by_name = {(c.request.ref.index, c.caption_index): c for c in found}
    assert len(by_name) == len(found)
    return by_name


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_every_request_has_one_answer_however_slowly_they_come(
    num_requests: int, burst: int, slots: int, prefill_batch: int
) -> None:
    made = captioner(
        SamplingSettings(max_new_tokens=5), SpeedSettings(slots, prefill_batch=prefill_batch)
    )
    requests = requests_of(made, ["what"] * num_requests)
    found = answers(made, ListSource(requests, burst, seed=num_requests))
    assert sorted(found) == [(i, 0) for i in range(num_requests)]
    again = captioner(SamplingSettings(max_new_tokens=5))
    others = answers(again, ListSource(requests))
    assert {name: c.text for name, c in found.items()} == {n: c.text for n, c in others.items()}


def test_a_prompt_that_is_too_long_costs_its_own_row() -> None:
    made = captioner(SamplingSettings(max_new_tokens=4, max_text_tokens=6))
    found = answers(made, ListSource(requests_of(made, ["short", "much too long", "ok"])))
    assert [found[i, 0].error for i in range(3)] == [None, "prompt_too_long", None]
    assert found[1, 0].error_detail == "14 prompt tokens; at most 7 fit"


def test_a_stop_string_ends_a_caption_and_is_not_part_of_it() -> None:
    whole = captioner(SamplingSettings(max_new_tokens=30, max_repeats=0))
    plain = answers(whole, ListSource(requests_of(whole, ["one"])))[0, 0]
    assert plain.text is not None
    stop = plain.text[7:9]
    place = plain.text.find(stop)
    made = captioner(SamplingSettings(max_new_tokens=30, max_repeats=0, stop=(stop, "\x7f")))
    cut = answers(made, ListSource(requests_of(made, ["one"])))[0, 0]
    assert cut.text == plain.text[:place].strip()
    assert cut.finish_reason == "stop"
    assert cut.num_caption_tokens == place + len(stop)


def test_fewer_slots_than_captions_are_refused() -> None:
    sampling = SamplingSettings(num_captions=3, temperature=1.0)
    with pytest.raises(RequestError, match="--slots is 2; wanted --num-captions"):
        captioner(sampling, SpeedSettings(slots=2))


def test_new_tokens_beyond_the_networks_positions_are_refused() -> None:
    with pytest.raises(RequestError, match="--max-new-tokens is 600"):
        list(captioner(SamplingSettings(max_new_tokens=600)).caption(ListSource([])))


def test_the_preview_shows_what_the_network_gets() -> None:
    shown = captioner().preview(Image.new("RGB", (3, 3)), "ab")
    assert shown.text == "<image>ab"
    assert shown.ids == (61, 2, 3)


def test_a_device_or_dtype_that_is_not_here_is_named() -> None:
    for name in ("tpu", "cuda:99", "cuda:x"):
        with pytest.raises(RequestError, match=name):
            choose_device(name)
    with pytest.raises(RequestError, match="int4"):
        choose_dtype("int4", torch.device("cpu"))
    assert choose_device("cpu") == torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A Turing GPU and an Ampere one; returns which of them a thread has made its own."""
    entered: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda d: [(7, 5), (8, 6)][d.index])
    monkeypatch.setattr("torch.cuda.set_device", entered.append)
    return entered


def test_a_gpu_has_its_number_and_its_own_best_dtype(two_gpus: list[torch.device]) -> None:
    for name, number in {"auto": 0, "cuda": 0, "cuda:0": 0, "cuda:1": 1, "auto@3": 1}.items():
        assert choose_device(name) == torch.device("cuda", number)
    assert Placement.choose("cuda:0", "auto").dtype == torch.float32
    assert Placement.choose("cuda:1", "auto").dtype == torch.bfloat16
    assert Placement.choose("cuda:0", "float16").dtype == torch.float16
    with pytest.raises(RequestError, match="cuda:2; torch sees 2 CUDA devices"):
        choose_device("cuda:2")
    Placement.choose("cuda:1", "auto").enter()
    assert two_gpus == [torch.device("cuda", 1)]
    CPU64.enter()
    assert len(two_gpus) == 1


def small_memory(monkeypatch: pytest.MonkeyPatch, max_slots: int) -> None:
    original = engine.KVCache

    def cache(spec, num_slots, *rest):  # type: ignore[no-untyped-def]
        if num_slots > max_slots:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return original(spec, num_slots, *rest)

    monkeypatch.setattr(engine, "KVCache", cache)


def test_a_cache_that_does_not_fit_has_fewer_slots_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_memory(monkeypatch, max_slots=3)
    made = captioner(SamplingSettings(max_new_tokens=4), SpeedSettings(slots=8, prefill_batch=8))
    found = answers(made, ListSource(requests_of(made, ["what"] * 9)))
    assert len(found) == 9
    assert made.notices == [
        "out of memory with a cache of 8 slots: it has 4 now",
        "out of memory with a cache of 4 slots: it has 2 now",
    ]


def test_a_cache_that_fits_at_no_size_ends_the_job_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_memory(monkeypatch, max_slots=0)
    made = captioner(SamplingSettings(max_new_tokens=4), SpeedSettings(slots=4))
    with pytest.raises(JobError, match="KV cache of 1 slots does not fit"):
        list(made.caption(ListSource(requests_of(made, ["what"]))))


def test_workers_of_one_machine_take_the_visible_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    chosen = [choose_device(f"auto@{worker}") for worker in (0, 3, 5)]
    assert [str(device) for device in chosen] == ["cuda:0", "cuda:3", "cuda:1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto@3").type in ("cpu", "mps")
