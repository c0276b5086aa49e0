"""Laws 1 to 3, each with seeded mistakes that its check must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.captioner import SamplingSettings
from pipeline.engine import cache, engine, padding, prompts, sequence
from pipeline.engine.cache import DecodeView, KVCache, PrefillView
from pipeline.engine.device import Device
from pipeline.engine.in_flight import Flight
from pipeline.engine.padding import left_pad, prefill_mask
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence
from tests.engine.laws import (
    DEVICE,
    MODEL,
    WAYS,
    Settings,
    assert_batch_equals_alone,
    make_request,
    through_engine,
)
from tests.engine.tape import LateDevice

drawn_prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)
shapes = st.builds(
    Settings,
    slots=st.integers(1, 9),
    prefill_batch=st.integers(1, 6),
    max_new_tokens=st.integers(1, 14),
    device=st.sampled_from(list(WAYS.values())),
)

# A job with short and long prompts, images and none, more requests than slots.
MIXED = [
    make_request(i, [(7 * i + j) % 61 for j in range(1 + (5 * i) % 9)], num_tiles=i % 4)
    for i in range(14)
]
SETTINGS = Settings(slots=4, prefill_batch=3, max_new_tokens=12)


@given(drawn_prompts, shapes)
@settings(max_examples=40, deadline=None)
def test_a_sequence_in_any_batch_gives_the_tokens_it_gives_alone(
    drawn: list[tuple[list[int], int]], shape: Settings
) -> None:
    requests = [make_request(i, ids, tiles) for i, (ids, tiles) in enumerate(drawn)]
    assert_batch_equals_alone(requests, shape)


@given(
    drawn_prompts,
    st.integers(0, 2**40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(list(WAYS.values())),
)
@settings(max_examples=30, deadline=None)
def test_a_drawn_caption_depends_on_seed_key_and_caption_index_alone(
    drawn: list[tuple[list[int], int]],
    seed: int,
    num_captions: int,
    extra_slots: int,
    device: Callable[[], Device],
) -> None:
    requests = [make_request(i, ids, tiles) for i, (ids, tiles) in enumerate(drawn)]
    sampling = SamplingSettings(
        max_new_tokens=8,
        temperature=1.3,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.2,
        min_new_tokens=2,
        num_captions=num_captions,
        seed=seed,
    )
    slots = num_captions + extra_slots
    shape = Settings(slots, 2, max_new_tokens=8, sampling=sampling, device=device)
    assert_batch_equals_alone(requests, shape)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_all_ending_on_their_first_token_hangs_nothing_and_loses_nothing(
    num_requests: int, slots: int, prefill_batch: int, lag: int
) -> None:
    requests = [make_request(i, [1 + i]) for i in range(num_requests)]
    every_id = frozenset(range(61))
    shape = Settings(slots, prefill_batch, device=partial(LateDevice, DEVICE, lag))
    assert_batch_equals_alone(requests, shape, eos=every_id)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_no_mask_row_is_empty_and_no_query_sees_padding_or_the_future(lengths: list[int]) -> None:
    batch = left_pad([[1] * length for length in lengths], DEVICE)
    mask = batch.mask[:, 0]
    assert mask.any(dim=-1).all()
    columns = mask.shape[-1]
    for row, length in enumerate(lengths):
        start = columns - length
        real = mask[row, start:]
        assert torch.equal(real[:, start:], torch.ones(length, length, dtype=torch.bool).tril())
        assert not real[:, :start].any()
        assert batch.positions[row, start:].tolist() == list(range(length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_nan_leaves_a_heavily_padded_prefill(dtype: torch.dtype) -> None:
    batch = left_pad([[5], [1] * 30], DEVICE)
    model = type(MODEL)().to(dtype)
    hidden = model.decoder(model.decoder.embed(batch.ids), batch.positions, batch.mask)
    assert hidden.isfinite().all()


def test_sequences_end_one_by_one_and_their_slots_are_taken_again() -> None:
    ended = through_engine(MIXED, SETTINGS)
    lengths = {len(sequence.token_ids) for sequence in ended}
    assert len(lengths) > 3, "the example no longer mixes early and late ends"
    assert len(ended) == len(MIXED)


# -- Seeded mistakes: each is one that this field has shipped.


def positions_count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoVLM#80: positions run over the padding as well."""

    def pad(*args: object, **kwargs: int) -> padding.PrefillBatch:
        batch = left_pad(*args, **kwargs)  # type: ignore[arg-type]
        columns = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
        return padding.PrefillBatch(batch.ids, columns, batch.mask, batch.is_real, batch.lengths)

    monkeypatch.setattr(prompts, "left_pad", pad)
    store_by_position_less_padding(monkeypatch)


def store_by_position_less_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefillView.__init__

    def init(self: PrefillView, store: KVCache, slots: list[int], batch: object) -> None:
        original(self, store, slots, batch)  # type: ignore[arg-type]
        own = (batch.is_real.cumsum(-1) - 1).clamp(min=0)  # type: ignore[attr-defined]
        self._columns = own[batch.is_real]  # type: ignore[attr-defined]

    monkeypatch.setattr(PrefillView, "__init__", init)


def padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#22707: real queries attend to padding."""

    def mask(is_real: torch.Tensor) -> torch.Tensor:
        return prefill_mask(torch.ones_like(is_real))

    monkeypatch.setattr(padding, "prefill_mask", mask)


def one_length_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row writes and looks where the longest row does."""
    original = DecodeView.__init__

    def init(self: DecodeView, store: KVCache, num_rows: int) -> None:
        original(self, store, num_rows)
        self._lengths = self._lengths.amax().expand_as(self._lengths).clone()

    monkeypatch.setattr(DecodeView, "__init__", init)


def a_move_forgets_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap is closed with the keys alone."""

    def copy(self: KVCache, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.lengths[target] = self.lengths[source]

    monkeypatch.setattr(KVCache, "copy", copy)


def the_last_column_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest token does not see itself."""
    original = DecodeView.mask.fget
    assert original is not None

    def mask(self: DecodeView) -> torch.Tensor:
        columns = torch.arange(self._num_columns)
        return (columns < self._lengths[:, None])[:, None, None]

    monkeypatch.setattr(cache.DecodeView, "mask", property(mask))


def row_zero_stops_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness#124: one end token ends the batch."""
    original = engine.Engine._land

    def land(self: engine.Engine, flights: Iterable[Flight]) -> list[Sequence]:
        first = self._scheduler.slots[0]
        ended = original(self, flights)
        for other in self._scheduler.live() if first in ended else ():
            other.finish_reason = "eos"
            self._free(other, is_clean=True)
            ended.append(other)
        return ended

    monkeypatch.setattr(engine.Engine, "_land", land)


def a_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a batch is taken from the queue and never run."""
    original = Scheduler.next_batch

    def next_batch(self: Scheduler) -> list:  # type: ignore[type-arg]
        batch = original(self)
        return batch[:-1] if len(batch) > 2 else batch

    monkeypatch.setattr(Scheduler, "next_batch", next_batch)


def neighbours_share_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One generator for the whole batch, as most samplers have it."""
    shared = sequence.row_random(0, "all", 0)
    monkeypatch.setattr(sequence, "row_random", lambda *_: shared)


MISTAKES = [
    padding_is_seen,
    one_length_for_all_rows,
    a_move_forgets_the_values,
    the_last_column_is_off_by_one,
    row_zero_stops_everybody,
    a_request_is_dropped,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_laws_catch_a_seeded_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_batch_equals_alone(MIXED, SETTINGS)
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        assert_batch_equals_alone(MIXED, SETTINGS)


def test_the_laws_catch_positions_that_count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE is relative, so padding outside the prompt shifts nothing that can be seen, until
    the cache continues at the row's own length: then every later token is misplaced."""
    positions_count_padding(monkeypatch)
    with pytest.raises(AssertionError):
        assert_batch_equals_alone(MIXED, SETTINGS)


def test_the_laws_catch_shared_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingSettings(max_new_tokens=12, temperature=1.5)
    shape = Settings(4, 3, max_new_tokens=12, sampling=sampling)
    assert_batch_equals_alone(MIXED, shape)
    neighbours_share_random_numbers(monkeypatch)
    with pytest.raises(AssertionError):
        assert_batch_equals_alone(MIXED, shape)


def test_an_empty_mask_row_is_what_the_padding_rule_prevents() -> None:
    """The seeded mistake of law 3: without the diagonal a padded query's answer is NaN."""
    batch = left_pad([[5], [1] * 6], DEVICE)
    is_real = batch.is_real
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    empty = (causal & is_real[:, None, :])[:, None]
    assert not empty.any(dim=-1).all()
    scores = torch.zeros(2, 1, 6, 6).masked_fill(~empty, float("-inf"))
    assert scores.softmax(-1).isnan().any()
    assert (
        not torch.zeros(2, 1, 6, 6)
        .masked_fill(~batch.mask, float("-inf"))
        .softmax(-1)
        .isnan()
        .any()
    )
