"""The engine around the laws: refusals, failures, counters, slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.captioner import SamplingSettings
from pipeline.engine import cache
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence, row_random
from pipeline.errors import SampleError
from pipeline.records import Request
from tests.engine import laws
from tests.engine.laws import (
    MODEL,
    Settings,
    alone,
    make_engine,
    make_request,
    through_engine,
)
from tests.engine.small_memory import SmallMemory


def test_a_prompt_that_can_never_fit_is_refused_at_the_door() -> None:
    engine = make_engine(Settings())
    with pytest.raises(SampleError, match="41 prompt tokens; at most 40 fit"):
        engine.submit(make_request(0, [1] * 41))
    with pytest.raises(SampleError, match="0 prompt tokens"):
        engine.submit(make_request(0, []))
    engine.submit(make_request(0, [1] * 40))


def test_the_longest_prompt_and_the_longest_caption_fit_together() -> None:
    shape = Settings(slots=1, max_new_tokens=14)
    (ended,) = through_engine([make_request(0, [1] * 40)], shape, eos=frozenset())
    assert ended.token_ids == alone(make_request(0, [1] * 40), shape, eos=frozenset())


def test_features_that_do_not_fit_a_prompt_cost_that_row_alone() -> None:
    whole = make_request(0, [5, 6], num_tiles=2)
    wrong = Request(
        whole.ref, whole.facts, prompt_ids=(MODEL.image_token_id, 5), images=whole.images
    )
    blind = Request(whole.ref, whole.facts, prompt_ids=(MODEL.image_token_id, 5))
    found = through_engine([wrong, whole, blind], Settings())
    (right,) = (sequence for sequence in found if sequence.error is None)
    assert right.token_ids == alone(whole, Settings())
    errors = [sequence.error for sequence in found if sequence.error is not None]
    assert [error.code for error in errors] == ["placeholder_mismatch"] * 2
    for features in (2, 0):
        detail = f"1 image places in the prompt, {features} image features"
        assert any(detail in error.detail for error in errors)


def test_pixels_are_let_go_once_they_are_features() -> None:
    """A slot would hold 13 MB of a picture of 17 tiles until its caption ends."""
    request = make_request(0, [5, 6], num_tiles=2)
    engine = make_engine(Settings(max_new_tokens=8), eos=frozenset())
    engine.submit(request)
    engine.close()
    engine.step()
    (live,) = engine._scheduler.live()
    assert live.request.images is None
    assert live.features is not None
    assert request.images is not None


def test_an_answer_that_is_not_finite_is_an_error_row_and_spoils_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [make_request(i, [1 + i, 2]) for i in range(6)]
    original = MODEL.next_logits

    def next_logits(ids, features, positions, mask, kv):  # type: ignore[no-untyped-def]
        logits = original(ids, features, positions, mask, kv)
        return logits.masked_fill(ids[:, :1] == 3, float("nan")) if ids.shape[1] > 1 else logits

    monkeypatch.setattr(MODEL, "next_logits", next_logits)
    ended = {s.request.ref.index: s for s in through_engine(requests, Settings())}
    monkeypatch.undo()
    error = ended.pop(2).error
    assert error is not None
    assert error.code == "not_finite"
    assert {i: s.token_ids for i, s in ended.items()} == {
        i: alone(requests[i], Settings()) for i in ended
    }


def test_counters_add_up() -> None:
    requests = [make_request(i, [1] * (1 + i % 3), num_tiles=i % 2) for i in range(10)]
    settings = Settings(slots=4, prefill_batch=4)
    engine = make_engine(settings)
    for request in requests:
        engine.submit(request)
    engine.close()
    ended = []
    while not engine.is_idle:
        ended += engine.step()
    counters = engine.counters
    assert counters.prompt_tokens == sum(len(r.prompt_ids) for r in requests)
    assert counters.new_tokens == sum(len(s.token_ids) for s in ended)
    # A caption's first token comes from its prefill, each other one from a busy slot-step.
    assert counters.busy_slot_steps == counters.new_tokens - len(requests)
    assert counters.total_slot_steps == 4 * counters.decode_steps
    assert counters.busy_slot_steps <= counters.total_slot_steps


def test_several_captions_of_an_image_prefill_once() -> None:
    sampling = SamplingSettings(max_new_tokens=6, temperature=2.0, num_captions=3)
    settings = Settings(slots=6, prefill_batch=4, max_new_tokens=6, sampling=sampling)
    engine = make_engine(settings)
    request = make_request(0, [1, 2, 3])
    engine.submit(request)
    ended = []
    while not engine.is_idle:
        ended += engine.step()
    assert engine.counters.prompt_tokens == 3
    assert sorted(s.caption_index for s in ended) == [0, 1, 2]
    assert len({tuple(s.token_ids) for s in ended}) > 1


def waits(request: Request) -> Sequence:
    return Sequence(request, 0, row_random(0, "", 0))


def test_captioning_skewed_lengths_keeps_slots_busy() -> None:
    """Static batches of this job would keep 4 slots under half busy."""
    lengths = [2, 2, 2, 40] * 16
    scheduler = Scheduler(num_slots=16, prefill_batch=4, num_captions=1)
    waiting = [make_request(i, [1]) for i in range(len(lengths))]
    left: dict[int, int] = {}
    busy = total = 0
    while waiting or scheduler.num_live or scheduler.waiting:
        while waiting and scheduler.num_wanted:
            scheduler.waiting.append(waits(waiting.pop(0)))
        if scheduler.can_prefill():
            for sequence in scheduler.next_batch():
                scheduler.place(sequence, scheduler.free_slots(1)[0])
                left[sequence.request.ref.index] = lengths[sequence.request.ref.index]
        live = scheduler.live()
        if waiting:  # the tail of a job cannot be busy
            busy, total = busy + len(live), total + 16
        for sequence in live:
            left[sequence.request.ref.index] -= 1
            if left[sequence.request.ref.index] == 0:
                scheduler.release(sequence)
    assert busy / total > 0.8


@pytest.mark.parametrize("group", [1, 2, 3, 16])
def test_groups_of_slots_change_no_caption(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GROUP_SLOTS", group)
    requests = [make_request(i, [1 + i % 5] * (1 + 5 * i % 23)) for i in range(12)]
    laws.assert_batch_equals_alone(requests, Settings(slots=7, max_new_tokens=14))


@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=24),
    group=st.integers(1, 9),
)
def test_closing_gaps_loses_nobody_and_takes_the_longest_of_the_next_group(
    lengths: list[int | None], group: int
) -> None:
    scheduler = Scheduler(len(lengths), 1, 1)
    waiting = [waits(make_request(i, [1] * (length or 1))) for i, length in enumerate(lengths)]
    for slot, length in enumerate(lengths):
        if length is not None:
            scheduler.place(waiting[slot], slot)
    before = {id(sequence) for sequence in scheduler.live()}
    borders = [*range(0, len(lengths), group), len(lengths)]
    holder = {sequence.slot: sequence for sequence in scheduler.live()}
    for source, target in scheduler.close_gaps(borders):
        assert target not in holder
        same_group = [s for s in holder if s // group == source // group]
        moved = holder.pop(source)
        if target // group != source // group:
            others = [len(holder[slot].prefix_ids) for slot in same_group if slot != source]
            assert len(moved.prefix_ids) >= max(others, default=0)
        holder[target] = moved
    assert sorted(holder) == list(range(len(before)))
    assert {id(sequence) for sequence in scheduler.live()} == before
    assert all(scheduler.slots[slot] is sequence for slot, sequence in holder.items())


def test_a_prefill_batch_takes_the_oldest_and_its_like() -> None:
    scheduler = Scheduler(num_slots=8, prefill_batch=3, num_captions=1)
    for i, length in enumerate([5, 30, 6, 31, 4, 29]):
        scheduler.waiting.append(waits(make_request(i, [1] * length)))
    assert [s.request.ref.index for s in scheduler.next_batch()] == [0, 2, 4]
    assert [s.request.ref.index for s in scheduler.next_batch()] == [1, 3, 5]
    assert not scheduler.waiting


def test_memory_of_the_cache_is_what_the_spec_says() -> None:
    engine = make_engine(Settings(slots=3, max_new_tokens=5))
    cache = engine._cache
    found = cache.keys.nbytes + cache.values.nbytes
    assert found == 3 * (40 + 5 - 1) * MODEL.spec.cache_bytes_per_token(torch.float64)


@pytest.mark.parametrize("limits", [(1, 8), (2, 3), (8, 1), (3, 2)])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_out_of_memory_runs_less_at_a_time_and_changes_no_caption(
    limits: tuple[int, int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(i, [1 + i, 2, 3 + i % 3], num_tiles=i % 2) for i in range(9)]
    sampling = SamplingSettings(max_new_tokens=12, temperature=temperature)
    settings = Settings(8, 8, max_new_tokens=12, sampling=sampling)
    wanted = {r.ref.index: alone(r, settings) for r in requests}
    monkeypatch.setattr(laws, "MODEL", SmallMemory(*limits))
    ended = through_engine(requests, settings)
    assert {s.request.ref.index: s.token_ids for s in ended} == wanted
    assert len(ended) == len(requests)


def test_a_further_caption_that_loses_its_slot_still_knows_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [make_request(i, [1 + i, 2], num_tiles=1 + i % 2) for i in range(4)]
    sampling = SamplingSettings(max_new_tokens=12, temperature=1.2, num_captions=2)
    settings = Settings(8, 4, max_new_tokens=12, sampling=sampling)
    wanted = {(r.ref.index, i): alone(r, settings, i) for r in requests for i in range(2)}
    monkeypatch.setattr(laws, "MODEL", SmallMemory(max_prefill=8, max_decode=3))
    ended = through_engine(requests, settings)
    assert {(s.request.ref.index, s.caption_index): s.token_ids for s in ended} == wanted


def test_a_request_that_fits_nowhere_is_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(i, [1 + i, 2]) for i in range(5)]
    monkeypatch.setattr(laws, "MODEL", SmallMemory(max_prefill=0, max_decode=9))
    codes = [s.error and s.error.code for s in through_engine(requests, Settings())]
    assert codes == ["out_of_memory"] * 5
    monkeypatch.setattr(laws, "MODEL", SmallMemory(max_prefill=9, max_decode=0))
    ended = through_engine(requests, Settings(), eos=frozenset())
    assert [s.error and s.error.code for s in ended] == ["out_of_memory"] * 5


def test_running_out_of_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "MODEL", SmallMemory(max_prefill=2, max_decode=9))
    engine = make_engine(Settings(8, 8))
    for i in range(8):
        engine.submit(make_request(i, [1, 2]))
    engine.close()
    while not engine.is_idle:
        engine.step()
    assert engine.notices == [
        "out of memory with 8 prompts in a prefill: from now on at most 4",
        "out of memory with 4 prompts in a prefill: from now on at most 2",
    ]


def test_an_error_that_is_not_about_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(MODEL, "next_logits", fails)
    engine = make_engine(Settings())
    engine.submit(make_request(0, [1]))
    with pytest.raises(RuntimeError, match="shapes"):
        engine.step()
