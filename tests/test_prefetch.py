"""Working ahead: in order, bounded, and gone when it is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ShardError
from pipeline.prefetch import Prefetcher, PrefetchLimits


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    assert prefetch_threads() == []


def eventually(is_true: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(0, 60),
    threads=st.integers(1, 5),
    max_items=st.integers(1, 9),
    takes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_results_come_in_order_each_once(
    num: int, threads: int, max_items: int, takes: list[int]
) -> None:
    def work(i: int) -> int:
        time.sleep((i * 7919 % 5) * 0.0002)
        return i * i

    limits = PrefetchLimits(threads, max_items)
    found: list[int] = []
    with Prefetcher(range(num), work, limits) as ahead:
        for turn in range(10_000):
            size = takes[turn % len(takes)]
            taken = ahead.take(size, block=True)
            assert len(taken) <= size
            found += taken
            if not taken:
                break
        assert ahead.is_exhausted
        assert ahead.take(1, block=True) == []
    assert found == [i * i for i in range(num)]


def test_a_take_without_block_returns_at_once() -> None:
    gate = threading.Event()
    with Prefetcher(range(3), lambda i: gate.wait() and i, PrefetchLimits(2)) as ahead:
        assert ahead.take(9, block=False) == []
        assert not ahead.is_exhausted
        gate.set()
        eventually(lambda: ahead.num_ready == 3)
        assert ahead.take(9, block=False) == [0, 1, 2]
        assert ahead.take(1, block=True) == []
        assert ahead.is_exhausted


def test_no_more_is_pulled_than_there_is_room_for() -> None:
    pulled: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            pulled.append(i)
            yield i

    with Prefetcher(source(), lambda i: i, PrefetchLimits(3, max_items=5)) as ahead:
        eventually(lambda: ahead.num_ready == 5)
        time.sleep(0.02)
        assert len(pulled) == 5
        assert ahead.take(2, block=True) == [0, 1]
        eventually(lambda: len(pulled) == 7)


def test_bytes_are_bounded_too_and_one_large_item_still_passes() -> None:
    pulled: list[int] = []

    def source() -> Iterator[int]:
        for size in (10, 10, 1000, 10, 10):
            pulled.append(size)
            yield size

    limits = PrefetchLimits(2, max_items=50, max_bytes=25)
    with Prefetcher(source(), lambda i: i, limits, weigh_item=int) as ahead:
        eventually(lambda: ahead.num_ready == 3)
        time.sleep(0.02)
        assert pulled == [10, 10, 1000]
        assert ahead.take(3, block=True) == [10, 10, 1000]
        assert list(ahead) == [10, 10]


def test_what_came_out_is_weighed_as_it_is() -> None:
    limits = PrefetchLimits(1, max_items=50, max_bytes=1000)
    with Prefetcher(
        range(100), lambda i: bytes(400), limits, weigh_item=lambda _: 1, weigh_result=len
    ) as ahead:
        eventually(lambda: ahead.num_ready == 3)
        time.sleep(0.02)
        assert ahead.num_ready == 3


def test_an_error_of_the_source_comes_after_all_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise ShardError("x.tar", "cut")

    with Prefetcher(source(), lambda i: i, PrefetchLimits(3)) as ahead:
        assert [next(iter(ahead)) for _ in range(5)] == list(range(5))
        with pytest.raises(ShardError, match="cut"):
            ahead.take(1, block=True)
        assert ahead.is_exhausted
        assert ahead.take(1, block=True) == []


def test_an_error_of_the_work_comes_in_its_turn_and_ends_the_stream() -> None:
    def work(i: int) -> int:
        if i == 3:
            raise ValueError("three")
        return i

    with Prefetcher(range(100), work, PrefetchLimits(4)) as ahead:
        assert [ahead.take(1, block=True) for _ in range(3)] == [[0], [1], [2]]
        with pytest.raises(ValueError, match="three"):
            ahead.take(5, block=True)
        assert ahead.take(5, block=True) == []
        assert ahead.is_exhausted


def test_closing_early_ends_the_threads_and_closes_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    with Prefetcher(source(), lambda i: i, PrefetchLimits(4, max_items=4)) as ahead:
        ahead.take(1, block=True)
    assert closed.is_set()
    assert prefetch_threads() == []
    assert ahead.take(1, block=True) == []
    ahead.close()


def test_closing_wakes_whoever_waits() -> None:
    gate = threading.Event()
    ahead = Prefetcher(range(3), lambda i: gate.wait() and i, PrefetchLimits(1))
    found: list[list[int | bool]] = []
    waiter = threading.Thread(target=lambda: found.append(ahead.take(1, block=True)))
    waiter.start()
    gate_opener = threading.Timer(0.05, gate.set)
    gate_opener.start()
    ahead.close()
    waiter.join(5)
    gate_opener.join(5)
    assert found in ([[]], [[0]])


def test_an_interrupt_in_the_middle_leaves_nothing_behind() -> None:
    def interrupted() -> None:
        with Prefetcher(range(10**9), lambda i: i, PrefetchLimits(2)) as ahead:
            ahead.take(3, block=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_the_time_blocked_is_measured() -> None:
    def work(i: int) -> int:
        time.sleep(0.05)
        return i

    with Prefetcher([1], work, PrefetchLimits(1)) as ahead:
        assert ahead.take(1, block=True) == [1]
        assert ahead.take(1, block=True) == []
    assert 0.03 < ahead.waiting_seconds < 5
