"""Law 7: each image belongs to exactly one worker, at any world size; and nobody gets too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RequestError
from pipeline.input import dealing
from pipeline.input.dealing import STEPS, TURN, Slice, cut, deal
from pipeline.records import Shard

SIZES = st.lists(st.one_of(st.none(), st.integers(0, 10**12)), max_size=40)
Deal = Callable[[Sequence[Shard], int, int], list[Slice]]


def shards_of(sizes: Sequence[int | None]) -> list[Shard]:
    return [Shard(str(i), f"/{i}.tar", size) for i, size in enumerate(sizes)]


def check_law(sizes: Sequence[int | None], world_size: int, num_images: int) -> None:
    """Assert that each image of each shard has one worker, shards of no images among them."""
    shards = shards_of(sizes)
    plans = [dealing.deal(shards, rank, world_size) for rank in range(world_size)]
    for shard in shards:
        mine = [one for plan in plans for one in plan if one.shard is shard]
        for index in range(num_images):
            assert sum(index in one for one in mine) == 1, (shard, index)
        assert sum(one.end - one.begin for one in mine) == TURN
    for plan in plans:
        order = [int(one.shard.id) for one in plan]
        assert order == sorted(set(order)), "in the order given, each shard once"


@given(SIZES, st.integers(1, 70), st.integers(0, 40))
def test_each_image_has_exactly_one_worker(
    sizes: list[int | None], world_size: int, num_images: int
) -> None:
    check_law(sizes, world_size, num_images)


def _ends_included(self: Slice, index: object) -> bool:
    return isinstance(index, int) and self.begin <= index * self.step % TURN <= self.end


def _in_floats(self: Slice, index: object) -> bool:
    at = math.modf(index * (self.step / TURN))[0] if isinstance(index, int) else -1.0
    return round(self.begin / TURN, 2) <= at < round(self.end / TURN, 2) - 0.01


def _by_own_load(shards: Sequence[Shard], rank: int, world_size: int) -> list[Slice]:
    """Every worker leaves out what it takes for another's, of which there is none."""
    return [Slice(one) for i, one in enumerate(shards) if i % (world_size + 1) == rank]


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (Slice, "__contains__", _ends_included),
        (Slice, "__contains__", _in_floats),
        (dealing, "deal", _by_own_load),
        (dealing, "UNEVEN", 0.0),  # not a mistake: all is cut, and the law holds
    ],
)
def test_the_law_catches_seeded_mistakes(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, mistake: object
) -> None:
    def is_law_broken() -> bool:
        try:
            # Half a turn is an end, and no multiple of a step; so one is made to be.
            monkeypatch.setattr(dealing, "STEPS", (TURN // 2,) * len(STEPS))
            check_law([1], 2, 4)
            monkeypatch.setattr(dealing, "STEPS", STEPS)
            for sizes, world_size in (([5], 3), ([10, 1, 1], 4), ([3] * 7, 2)):
                check_law(sizes, world_size, 200)
        except AssertionError:
            return True
        return False

    assert not is_law_broken()
    monkeypatch.setattr(owner, name, mistake)
    assert is_law_broken() == (name != "UNEVEN")


@given(SIZES.filter(any), st.integers(1, 70))
def test_nobody_has_more_than_a_tenth_above_the_fair_share(
    sizes: list[int | None], world_size: int
) -> None:
    shards = [shard for shard in shards_of(sizes) if shard.size]
    fair = sum(shard.size or 0 for shard in shards) / world_size
    for rank in range(world_size):
        mine = deal(shards, rank, world_size)
        assert sum((one.shard.size or 0) * one.share for one in mine) <= 1.1 * fair + 1e-6


@pytest.mark.parametrize(("num_shards", "world_size"), [(1, 8), (3, 8), (9, 8), (65, 64)])
@pytest.mark.parametrize("size", [None, 10**9])
def test_with_few_shards_every_worker_has_work(
    num_shards: int, world_size: int, size: int | None
) -> None:
    shards = shards_of([size] * num_shards)
    for rank in range(world_size):
        mine = deal(shards, rank, world_size)
        num_images = sum(index in one for one in mine for index in range(1000))
        assert num_images == pytest.approx(1000 * num_shards / world_size, rel=0.1, abs=2 * 3)


def test_shards_that_balance_stay_whole() -> None:
    for sizes, world_size in (([1] * 64, 64), ([5, 4, 3, 3], 2), ([7] * 1000, 9)):
        for rank in range(world_size):
            assert all(one.is_whole for one in deal(shards_of(sizes), rank, world_size))


@pytest.mark.parametrize("num_slices", range(2, 20))
def test_a_slice_has_its_share_of_any_run_of_images(num_slices: int) -> None:
    for one in cut(Shard("a", "/a.tar"), num_slices):
        assert one.share == pytest.approx(1 / num_slices)
        for begin, end in ((0, 31), (0, 1000), (5000, 5100)):
            wanted = (end - begin) / num_slices
            assert sum(i in one for i in range(begin, end)) == pytest.approx(wanted, abs=4)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (8, 3), (3, 8), (2, 5), (16, 5), (5, 12)])
def test_what_a_slice_left_undone_is_shared_by_all_workers_of_another_world(
    before: int, after: int
) -> None:
    shard = Shard("a", "/a.tar")
    left = [index for index in range(4000) if index in cut(shard, before)[-1]]
    for one in cut(shard, after):
        assert sum(index in one for index in left) == pytest.approx(
            len(left) / after, rel=0.4, abs=8
        )


def test_names_of_slices_are_safe_and_differ() -> None:
    names = [one.id for n in range(1, 40) for one in cut(Shard("a-1f", "/a.tar"), n)]
    assert len(set(names)) == len(names)
    assert names[0] == "a-1f"
    assert all("/" not in name and name.isascii() for name in names)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(RequestError, match="wanted a rank"):
        deal([], rank, world_size)
