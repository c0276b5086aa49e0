"""Tokens read late, and captured steps: captions and counts as of an engine that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.captioner import SamplingSettings
from pipeline.engine.cache import KVCache, StepView
from pipeline.engine.device import Device
from pipeline.engine.engine import Engine
from pipeline.engine.in_flight import Flight, InFlight
from pipeline.engine.said import Said
from pipeline.engine.sampling import Draws, Sampler
from pipeline.engine.sequence import Sequence
from pipeline.engine.static_decoding import StaticDecoder, graph_rows
from pipeline.engine.stopping import StopRules
from pipeline.models.attention import RopeScaling
from pipeline.models.tiny import TINY_SPEC, TinyModel
from pipeline.records import Request
from tests.engine import laws
from tests.engine.laws import (
    DEVICE,
    EOS,
    MODEL,
    WAYS,
    Settings,
    alone,
    assert_batch_equals_alone,
    make_engine,
    make_request,
)
from tests.engine.small_memory import SmallMemory
from tests.engine.tape import LateDevice, TapedDevice

REQUESTS = [
    make_request(i, [(7 * i + j) % 61 for j in range(1 + (5 * i) % 9)], num_tiles=i % 4)
    for i in range(14)
]
LATE = partial(LateDevice, DEVICE, 2)
TAPED = partial(TapedDevice, DEVICE, 1)
# Every setting that looks at tokens or at numbers of a row.
DRAWN = SamplingSettings(
    max_new_tokens=12,
    min_new_tokens=3,
    temperature=1.3,
    top_p=0.95,
    repetition_penalty=1.3,
    num_captions=2,
    seed=5,
)
GREEDY = SamplingSettings(max_new_tokens=12)


def run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    """Answer requests that are all there at once."""
    ended: list[Sequence] = []
    waiting = list(requests)
    for _ in range(1000):
        while waiting and engine.num_wanted:
            engine.submit(waiting.pop(0))
        if not waiting:
            engine.close()
        if engine.is_idle:
            return ended
        ended += engine.step()
    raise AssertionError("the engine does not come to an end")


def answers(ended: list[Sequence]) -> dict[tuple[int, int], tuple[object, ...]]:
    return {
        (s.request.ref.index, s.caption_index): (
            s.token_ids,
            pytest.approx(s.sum_logprob, abs=1e-9),
            s.finish_reason,
        )
        for s in ended
    }


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_captions_and_counts_are_those_of_an_engine_that_waits(
    way: str, sampling: SamplingSettings
) -> None:
    settings = Settings(slots=6, prefill_batch=3, sampling=sampling)
    waiting, late = make_engine(settings), make_engine(replace(settings, device=WAYS[way]))
    wanted, found = answers(run(waiting, REQUESTS)), answers(run(late, REQUESTS))
    assert found == wanted
    for count in ("new_tokens", "prompt_tokens", "busy_slot_steps"):
        assert getattr(late.counters, count) == getattr(waiting.counters, count)
    assert late.counters.total_slot_steps == 6 * late.counters.decode_steps


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_stop_texts_and_repetition_end_a_caption_where_they_do_at_once(way: str) -> None:
    """The host finds them, late; what was run since is thrown away."""
    rules = StopRules(frozenset({10}), 30, 2, lambda ids: list(ids[-2:]) == [39, 39])
    settings = Settings(slots=5, max_new_tokens=30)
    texts = [[20 + i % 3] * 3 if i % 2 else [1 + i, 2] for i in range(12)]
    requests = [make_request(i, text) for i, text in enumerate(texts)]
    found = []
    for device in (WAYS["at once"], WAYS[way]):
        engine = make_engine(replace(settings, device=device))
        engine._rules = rules
        found.append(answers(run(engine, requests)))
    assert found[0] == found[1]
    reasons = {reason for _, _, reason in found[0].values()}
    assert reasons == {"stop", "repetition", "eos", "length"}, "the example has lost a reason"


def test_steps_are_captured_once_a_shape_and_replayed() -> None:
    device = TAPED()
    run(make_engine(Settings(slots=4, device=lambda: device)), REQUESTS)
    assert 1 <= device.num_captured <= 3  # shapes of 1, 2 and 4 rows, as long as one block
    assert device.num_replayed > 10


def test_a_captured_step_scales_positions_by_its_rows_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nanoVLM's positions beyond the limit are scaled by how long each row is by now."""
    spec = replace(TINY_SPEC, max_positions=8, rope_scaling=RopeScaling("overflow"))
    monkeypatch.setattr(laws, "MODEL", TinyModel(spec).double().eval())
    waiting = answers(run(make_engine(Settings(slots=4)), REQUESTS))
    captured = answers(run(make_engine(Settings(slots=4, device=TAPED)), REQUESTS))
    assert captured == waiting
    monkeypatch.setattr(laws, "MODEL", MODEL)
    assert waiting != answers(run(make_engine(Settings(slots=4)), REQUESTS))


@pytest.mark.parametrize("way", ["late by 1", "late by 2", "captured, late by 2"])
def test_captions_that_end_by_their_length_take_no_step_more(way: str) -> None:
    settings = Settings(slots=4, prefill_batch=4, max_new_tokens=7)
    requests = [make_request(i, [1 + i, 2]) for i in range(8)]
    waiting = make_engine(settings, eos=frozenset())
    late = make_engine(replace(settings, device=WAYS[way]), eos=frozenset())
    assert answers(run(late, requests)).keys() == answers(run(waiting, requests)).keys()
    assert late.counters.decode_steps == waiting.counters.decode_steps == 2 * 6


def test_a_surplus_token_is_a_step_of_nobody() -> None:
    """A caption that ends by its end token runs once for each step queued since."""
    request = make_request(0, [1, 2])
    length = len(alone(request, Settings()))
    assert length < 12, "the example ends by its length"
    engine = make_engine(Settings(slots=1, device=LATE))
    run(engine, [request])
    assert engine.counters.new_tokens == length
    assert engine.counters.busy_slot_steps == length - 1
    assert engine.counters.decode_steps == length - 1 + 2


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("limits", [(1, 8), (2, 3), (3, 2)])
def test_out_of_memory_changes_no_caption_where_tokens_are_read_late(
    way: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(i, [1 + i, 2, 3 + i % 3], num_tiles=i % 2) for i in range(9)]
    sampling = replace(DRAWN, num_captions=1)
    settings = Settings(8, 8, sampling=sampling, device=WAYS[way])
    wanted = {r.ref.index: alone(r, settings) for r in requests}
    monkeypatch.setattr(laws, "MODEL", SmallMemory(*limits))
    ended = run(make_engine(settings), requests)
    assert {s.request.ref.index: s.token_ids for s in ended} == wanted
    assert len(ended) == len(requests)


# -- Numbers that are not finite, of which the host hears late.


def end_tokens_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whatever runs behind an end token fill its slot with NaN."""
    original = MODEL.decoder.embed

    def embed(ids: torch.Tensor) -> torch.Tensor:
        is_end = torch.isin(ids, torch.tensor(sorted(EOS)))
        return original(ids).masked_fill(is_end[:, :, None], float("nan"))

    monkeypatch.setattr(MODEL.decoder, "embed", embed)


def plain_requests() -> list[Request]:
    """Prompts without an end token."""
    texts = [[1 + i % 8] * (2 + (5 * i) % 9) for i in range(14)]
    return [make_request(i, text) for i, text in enumerate(texts)]


@pytest.mark.parametrize("way", list(WAYS))
def test_what_runs_past_an_end_spoils_no_later_caption(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {r.ref.index: alone(r, Settings()) for r in plain_requests()}
    end_tokens_are_not_finite(monkeypatch)
    ended = run(make_engine(Settings(slots=4, device=WAYS[way])), plain_requests())
    assert {s.request.ref.index: s.token_ids for s in ended} == wanted


@pytest.mark.parametrize("way", list(WAYS))
def test_an_answer_that_is_not_finite_spoils_no_neighbour_wherever_it_was_moved(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token turns the keys of some captions into NaN in the midst of others."""
    wanted = {r.ref.index: alone(r, Settings()) for r in plain_requests()}
    counts = Counter(token for ids in wanted.values() for token in set(ids[:-1]))
    bad = next(token for token, count in counts.items() if 2 <= count <= 6)
    original = MODEL.decoder.embed

    def embed(ids: torch.Tensor) -> torch.Tensor:
        is_bad = (ids == bad) if ids.shape[1] == 1 else torch.zeros_like(ids, dtype=torch.bool)
        return original(ids).masked_fill(is_bad[:, :, None], float("nan"))

    monkeypatch.setattr(MODEL.decoder, "embed", embed)
    ended = run(make_engine(Settings(slots=4, device=WAYS[way])), plain_requests())
    assert len(ended) == len(wanted)
    for sequence in ended:
        ids = wanted[sequence.request.ref.index]
        if bad in ids[:-1]:
            assert sequence.error is not None
            assert sequence.error.code == "not_finite"
            assert sequence.token_ids == ids[: ids.index(bad) + 1]
        else:
            assert sequence.token_ids == ids


# -- Where capturing fails.


class NoCapture(TapedDevice):
    """A device that refuses to capture: for a reason of its own, or at some point for memory."""

    def __init__(self, why: str, num_allowed: int = 0) -> None:
        super().__init__(DEVICE, 1)
        self._why = why
        self._num_allowed = num_allowed

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.num_captured == self._num_allowed:
            raise RuntimeError(self._why)
        return super().capture(work)


def test_steps_run_uncaptured_where_a_capture_fails_and_it_is_said_once() -> None:
    device = NoCapture("operation not permitted when stream is capturing\nmore")
    settings = Settings(slots=4, device=lambda: device)
    engine = make_engine(settings)
    found = answers(run(engine, REQUESTS))
    assert found == answers(run(make_engine(Settings(slots=4)), REQUESTS))
    assert engine.notices == [
        "decode steps run uncaptured, and slower: operation not permitted when stream is capturing"
    ]


def test_a_capture_that_does_not_fit_gives_all_up() -> None:
    device = NoCapture("CUDA out of memory. Tried to allocate", num_allowed=1)
    engine = make_engine(Settings(slots=4, device=lambda: device))
    found = answers(run(engine, REQUESTS))
    assert found == answers(run(make_engine(Settings(slots=4)), REQUESTS))
    assert engine.notices == [
        "out of memory while captured decode steps (1) take some: from now on none is captured"
    ]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_captured_steps_are_given_up_before_sequences_are(
    is_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prefill or step after a capture finds no memory; the same one then has enough."""
    device = TAPED()
    engine = make_engine(Settings(slots=4, device=lambda: device))
    name = "run" if is_prefill else "step"
    part = engine._prompts if is_prefill else engine._decoder
    told: list[bool] = []
    original = getattr(part, name)

    def once(*args: object) -> object:
        if device.num_captured and not told:
            told.append(True)
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return original(*args)

    monkeypatch.setattr(part, name, once)
    found = answers(run(engine, REQUESTS))
    assert found == answers(run(make_engine(Settings(slots=4)), REQUESTS))
    (notice,) = engine.notices
    assert notice.endswith("take some: from now on none is captured")
    assert engine._scheduler.max_live == 4


def test_many_rows_have_few_shapes() -> None:
    shapes = {graph_rows(rows) for rows in range(1, 257)}
    assert len(shapes) < 30
    assert all(
        rows <= graph_rows(rows) <= max(8 * -(-rows // 8), 1.13 * rows) for rows in range(1, 513)
    )


# -- Seeded mistakes.


def surplus_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read late is taken for the caption's."""

    def land(self: Flight) -> list[tuple[Sequence, int, float]]:
        read = zip(self.rows, *self.read(), strict=True)
        return [(row, token, number) for row, token, number in read if row is not None]

    monkeypatch.setattr(Flight, "land", land)
    monkeypatch.setattr(Engine, "_free", lambda self, row, is_clean: None)


def a_move_forgets_the_newest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values move, the id that runs next does not."""
    monkeypatch.setattr(Said, "move", lambda self, source, target: None)


def a_random_number_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number behind the last token that was read, for all that are in flight."""

    def uniform(self: Sequence) -> float:
        if not self._uniforms:
            self._uniforms.append(self.random.random())
        return self._uniforms[0]

    monkeypatch.setattr(Sequence, "uniform", uniform)


def the_least_length_counts_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption's end is held back for too long."""
    original = Sampler.draws

    def draws(self: Sampler, sequences: list[Sequence], said: torch.Tensor | None = None) -> Draws:
        found, least = original(self, sequences, said), self._settings.min_new_tokens
        return replace(found, is_short=torch.tensor([len(s.token_ids) < least for s in sequences]))

    monkeypatch.setattr(Sampler, "draws", draws)


def who_loses_its_slot_loses_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted with tokens in flight."""

    def none(self: InFlight) -> Iterator[Flight]:
        return iter(())

    monkeypatch.setattr(InFlight, "all", none)


def slots_are_not_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has looked at stays for the next one."""
    monkeypatch.setattr(KVCache, "wipe", lambda self, slot: None)


def lengths_are_python_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step goes on to use the lengths of the day it was captured."""
    original = StepView.__init__

    def init(self: StepView, store: KVCache, lengths: torch.Tensor, columns: int) -> None:
        original(self, store, torch.tensor(store.lengths[: len(lengths)]), columns)

    monkeypatch.setattr(StepView, "__init__", init)


def a_step_chooses_by_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are put into new memory for each step, which no replay looks at."""
    original = StaticDecoder._draws

    def draws(self: StaticDecoder, num_rows: int):  # type: ignore[no-untyped-def]
        found = original(self, num_rows)
        return replace(found, uniforms=torch.tensor(self._uniforms[:num_rows].tolist()))

    monkeypatch.setattr(StaticDecoder, "_draws", draws)


def check_drawn(device: Callable[[], Device]) -> None:
    assert_batch_equals_alone(REQUESTS, Settings(slots=6, sampling=DRAWN, device=device))


def check_preempted(device: Callable[[], Device]) -> None:
    for temperature in (0.0, 1.3):
        sampling = SamplingSettings(max_new_tokens=12, temperature=temperature)
        settings = Settings(8, 8, sampling=sampling, device=device)
        wanted = {(r.ref.index, 0): alone(r, settings) for r in REQUESTS}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(laws, "MODEL", SmallMemory(8, 3))
            ended = run(make_engine(settings), REQUESTS)
        assert {name: ids for name, (ids, *_) in answers(ended).items()} == wanted
        assert len(ended) == len(REQUESTS)


def check_not_finite(device: Callable[[], Device]) -> None:
    wanted = {r.ref.index: alone(r, Settings()) for r in plain_requests()}
    with pytest.MonkeyPatch.context() as patch:
        end_tokens_are_not_finite(patch)
        ended = run(make_engine(Settings(slots=4, device=device)), plain_requests())
    assert {s.request.ref.index: s.token_ids for s in ended} == wanted


MISTAKES: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None], object]] = [
    (surplus_tokens_are_kept, check_drawn, LATE),
    (a_move_forgets_the_newest_token, check_drawn, LATE),
    (a_random_number_is_used_twice, check_drawn, LATE),
    (the_least_length_counts_what_was_read, check_drawn, LATE),
    (who_loses_its_slot_loses_tokens, check_preempted, LATE),
    (slots_are_not_wiped, check_not_finite, LATE),
    (lengths_are_python_numbers, check_drawn, TAPED),
    (a_step_chooses_by_numbers_of_its_own, check_drawn, TAPED),
]


@pytest.mark.parametrize(
    ("mistake", "check", "device"), MISTAKES, ids=lambda one: getattr(one, "__name__", "")
)
def test_the_laws_catch_a_seeded_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[object], None],
    device: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(device)
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check(device)
