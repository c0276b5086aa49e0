"""Two outputs of the same images: numbers, references, and a page in a real browser."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.compare.make import CompareRequest, compare, references_of
from jobs.compare.pairs import Reservoir, overlap_of
from jobs.compare.view import comparison_lines, print_comparison
from pipeline.errors import RequestError
from pipeline.fixtures import make_image_bytes, make_shard
from tests.commands import captionjob
from tests.jobs.browser import browser, console, outside_requests
from tests.jobs.outputs import HOSTILE, SCRIPT, hostile_members, make_output, several_captions


@dataclass(frozen=True)
class Two:
    a: Path
    b: Path
    shards: tuple[str, ...]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("two")
    texts = ("a dog on a beach\nthe dog at the sea\n", '["a red bus", "one bus in the street"]')
    members = []
    for place in range(10):
        members.append((f"{place}.jpg", make_image_bytes(seed=place)))
        members.append((f"{place}.txt", texts[place % 2].encode()))
    shards = [
        make_shard(folder / "plain.tar", members),
        make_shard(folder / "hostile.tar", hostile_members()),
    ]
    a = make_output(folder / "a", shards, HOSTILE | {"0": "a dog on a beach", "1": "a red bus"})
    b = make_output(
        folder / "b",
        shards,
        HOSTILE | {"0": "two cats", "1": "a red bus", "plain": "a dog at a beach"},
        prompt="Say it in short.",
    )
    return Two(a, b, tuple(shards))


def test_numbers(two: Two) -> None:
    found = compare(CompareRequest(two.a, two.b))
    sums = found.sums
    assert (sums.num_pairs, sums.only_a, sums.only_b) == (10 + len(HOSTILE) + 3, 0, 0)
    assert sums.num_same == len(HOSTILE) - 1 + 2 + 1  # the errors, and the red bus
    assert 0 < sums.mean_overlap < 1
    text = "\n".join(comparison_lines(found))
    assert 'prompt: "Describe the picture." in A, "Say it in short." in B' in text
    assert "images/s of a worker" in text


def test_the_same_output_agrees_with_itself(two: Two) -> None:
    sums = compare(CompareRequest(two.a, two.a)).sums
    assert sums.num_same == sums.num_pairs
    assert sums.mean_overlap == 1.0 or sums.mean_overlap == pytest.approx(1.0)


def test_references(two: Two) -> None:
    found = compare(CompareRequest(two.a, two.b, two.shards, references="txt"))
    assert found.scores is not None
    a, b = found.scores
    assert a.num_images == b.num_images == 10
    assert a.cider_d > b.cider_d
    assert references_of("one\n\ntwo\n") == ["one", "two"]
    assert references_of('["one", " ", "two"]') == ["one", "two"]
    assert references_of("[one") == ["[one"]
    assert references_of(None) == []


def test_images_that_only_one_has(two: Two, tmp_path: Path) -> None:
    one = make_output(tmp_path / "one", [two.shards[0]])
    sums = compare(CompareRequest(one, two.b)).sums
    assert (sums.num_pairs, sums.only_a, sums.only_b) == (10, 0, len(HOSTILE) + 3)
    shutil.copy(two.shards[0], tmp_path / "moved.tar")
    moved = make_output(tmp_path / "moved", [str(tmp_path / "moved.tar")])
    assert compare(CompareRequest(moved, one)).sums.num_same == 10
    other = make_shard(tmp_path / "other.tar", [("x.jpg", make_image_bytes(seed=77))])
    strange = make_output(tmp_path / "strange", [other])
    with pytest.raises(RequestError, match="no image in common"):
        compare(CompareRequest(strange, one))
    many = make_output(tmp_path / "many", [other], sampling=several_captions())
    with pytest.raises(RequestError, match="3 captions an image"):
        compare(CompareRequest(many, strange))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_the_page(two: Two, tmp_path: Path, chromium: Any, capsys: Any) -> None:
    path = tmp_path / "compare.html"
    request = CompareRequest(two.a, two.b, two.shards, references="txt")
    print_comparison(request, path, as_json=False)
    assert "\x1b" not in capsys.readouterr().out
    chromium.get(path.as_uri())
    cards = chromium.find_elements("css selector", ".card")
    assert len(cards) == 10 + len(HOSTILE) + 3
    assert "two cats" in cards[0].text or "a dog" in cards[0].text
    assert SCRIPT in chromium.find_element("css selector", ".cards").text
    assert len(chromium.find_elements("css selector", ".side b.r")) == 20
    chromium.find_element("css selector", ".kind[data-kind='most different']").click()
    shown = [card for card in cards if card.is_displayed()]
    assert len(shown) == 9 + 1 + 1  # all that differ and are no errors
    chromium.execute_script("arguments[0].click()", shown[0])
    assert chromium.find_element("id", "viewer").is_displayed()
    assert console(chromium) == []
    assert outside_requests(chromium) == []


def test_json_and_wrong_requests(two: Two, tmp_path: Path) -> None:
    done = captionjob("compare", str(two.a), str(two.b), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["rows"] == 10 + len(HOSTILE) + 3
    for extra in (("--to", "x.html"), ("--references", "txt")):
        done = captionjob("compare", str(two.a), str(two.b), *extra, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_words_in_common() -> None:
    assert overlap_of("a dog", "A DOG!") == 1
    assert overlap_of("a dog", "two cats") == 0
    assert overlap_of("a red dog", "a blue dog") == pytest.approx(2 / 3)
    assert overlap_of("", "") == 1
    assert overlap_of("", "a") == 0


def test_a_reservoir_is_fair() -> None:
    counts = [0] * 10
    for seed in range(2000):
        kept: Reservoir[int] = Reservoir(3, random.Random(seed))
        for item in range(10):
            kept.offer(item)
        for item in kept.kept:
            counts[item] += 1
    assert min(counts) > 500
    assert max(counts) < 700
