"""The page in a real browser: pictures, search, keys, no script but its own, no request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.report.make import MAX_PICTURES, ReportRequest, make_report
from jobs.report.page import shown
from pipeline.errors import RequestError
from pipeline.fixtures import make_image_bytes, make_shard
from tests.commands import captionjob
from tests.jobs.browser import browser, console, outside_requests
from tests.jobs.conftest import Job
from tests.jobs.outputs import HOSTILE, SCRIPT, make_output


@pytest.fixture(scope="module")
def page_path(hostile_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    make_report(ReportRequest(hostile_job.out, tuple(hostile_job.shards), path))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(chromium: Any, page_path: Path) -> Any:
    chromium.get(page_path.as_uri())
    return chromium


def visible(page: Any) -> list[Any]:
    return [card for card in page.find_elements("css selector", ".card") if card.is_displayed()]


def keys(page: Any, *pressed: str) -> None:
    page.switch_to.active_element.send_keys(*pressed)


def search(page: Any, text: str) -> None:
    box = page.find_element("id", "search")
    box.clear()
    box.send_keys(text)


def test_every_row_has_a_card_and_every_good_one_a_picture(page: Any) -> None:
    num_images = len(HOSTILE) + 1 + 20
    assert len(visible(page)) == num_images + 2
    loaded = page.execute_script(
        "const all = [...document.querySelectorAll('.card img')];"
        "all.forEach((one) => { one.loading = 'eager'; });"
        "return Promise.all(all.map((one) => one.decode().then(() => one.naturalWidth)));"
    )
    assert loaded == [32] * num_images


def test_nothing_leaves_the_page_and_nothing_is_wrong_with_it(page: Any) -> None:
    search(page, "dog")
    assert console(page) == []
    assert outside_requests(page) == []


def test_markup_in_captions_and_keys_shows_as_text(page: Any) -> None:
    assert page.title == "out"
    captions = [one.text for one in page.find_elements("css selector", ".card .caption")]
    assert SCRIPT in captions
    assert (
        page.execute_script("return document.querySelectorAll('.card script, .card b').length") == 0
    )
    assert page.execute_script("return document.scripts.length") == 1
    body = page.find_element("css selector", ".cards").text
    assert "\\x1b[31m" in body
    assert "\\u202egnp.exe" in body
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", body)


def test_a_foreign_script_would_be_stopped_by_the_policy(page: Any) -> None:
    page.execute_script(
        "const one = document.createElement('script'); one.textContent = 'window.owned = 1';"
        "document.body.append(one);"
        "const two = document.createElement('img'); two.src = 'https://example.org/x.png';"
        "document.body.append(two);"
    )
    assert page.execute_script("return window.owned") is None
    assert any("Content Security Policy" in line for line in console(page))
    assert outside_requests(page, with_blocked=False) == []


def test_search_filter_and_sort(page: Any) -> None:
    search(page, "DOG beach")
    assert {card.get_attribute("data-key") for card in visible(page)} == {"plain"}
    assert page.find_element("id", "count").text == "2 of 34"
    search(page, "no such words")
    assert page.find_element("id", "nothing").is_displayed()
    search(page, " ")
    page.find_element("css selector", "#status option:nth-child(2)").click()
    wanted = page.find_element("css selector", "#status").get_attribute("value")
    assert {card.get_attribute("data-status") for card in visible(page)} == {wanted}
    page.find_element("css selector", "#status option:first-child").click()
    page.find_element("css selector", ".kind[data-kind=failed]").click()
    assert {card.get_attribute("data-key") for card in visible(page)} == {"broken", "none"}
    page.find_element("css selector", ".kind[data-kind='']").click()
    for value, name, is_down in (
        ("logprob", "logprob", False),
        ("-tokens", "tokens", True),
        ("-same", "same", True),
    ):
        page.find_element("css selector", f"#sort option[value='{value}']").click()
        found = [card.get_attribute(f"data-{name}") for card in visible(page)]
        numbers = [float(one) for one in found if one]
        assert numbers == sorted(numbers, reverse=is_down)


def test_the_keyboard_is_enough(page: Any) -> None:
    keys(page, "/")
    assert page.switch_to.active_element.get_attribute("id") == "search"
    keys(page, "dog")
    assert len(visible(page)) == 2
    keys(page, "\ue00c")  # escape
    assert len(visible(page)) == 34
    first, second = visible(page)[:2]
    page.execute_script("arguments[0].focus()", first)
    keys(page, "\ue014")  # right
    assert page.switch_to.active_element == second
    keys(page, "\ue007")  # enter
    viewer = page.find_element("id", "viewer")
    assert viewer.is_displayed()
    assert viewer.find_element("css selector", ".viewer-place").text == "2 of 34"
    assert "sha256" in viewer.text
    keys(page, "\ue014")
    assert viewer.find_element("css selector", ".viewer-place").text == "3 of 34"
    keys(page, "\ue00c")
    assert not viewer.is_displayed()


def test_light_dark_and_phone(page: Any) -> None:
    def background() -> str:
        return str(page.execute_script("return getComputedStyle(document.body).backgroundColor"))

    light = background()
    for scheme in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        assert (background() == light) == (scheme == "light")
    page.find_element("id", "theme").click()
    assert background() != light
    size = {"width": 360, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_long_caption_does_not_make_a_long_card(page: Any) -> None:
    heights = {card.size["height"] for card in visible(page)}
    assert max(heights) < 600


def test_the_page_says_what_it_is_of(page_path: Path) -> None:
    text = page_path.read_text(encoding="utf-8")
    assert "max_new_tokens" in text
    assert text.count("<svg") == 6
    assert "://" not in re.sub(r'xmlns(:xlink)?="[^"]*"|"http://www.w3.org[^"]*"', "", text)
    assert page_path.stat().st_size < 25 << 20


def test_pictures_are_few_and_of_each_kind(tmp_path: Path) -> None:
    shard = make_shard(
        tmp_path / "s.tar",
        [(f"{i:03}.jpg", make_image_bytes(seed=i) if i % 10 else b"no") for i in range(120)],
    )
    texts = ("one", "two", "three")
    out = make_output(tmp_path / "out", [shard], lambda request: texts[request.ref.index % 3])
    made = make_report(ReportRequest(out, (shard,), tmp_path / "r.html", max_pictures=40))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.count('<li class="card"') == 40
    assert made.num_pictures < 40
    kinds = set(re.findall(r'data-kinds="([^"]*)"', text))
    found = {kind for one in kinds for kind in one.split("|")}
    assert found == {"failed", "least confident", "repeated", "longest", "shortest", "random"}
    assert "36 different images have the caption" in text
    assert MAX_PICTURES == 500


def test_a_page_too_large_gets_smaller_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.report import thumbnails

    pictures = {("s", i): make_image_bytes("WEBP", width=320, height=200, seed=i) for i in range(4)}
    whole = sum(map(len, thumbnails.fitted(pictures).values()))
    monkeypatch.setattr(thumbnails, "MAX_BYTES", whole // 2)
    assert sum(map(len, thumbnails.fitted(pictures).values())) <= whole // 2


def test_a_damaged_shard_still_gives_a_page(own_job: Job) -> None:
    shard = Path(own_job.shards[1])
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    path = own_job.folder / "r.html"
    made = make_report(ReportRequest(own_job.out, tuple(own_job.shards), path))
    assert made.num_pictures < 32
    assert "some pictures are missing" in path.read_text(encoding="utf-8")


def test_text_that_acts_is_made_visible() -> None:
    assert shown("a\x00b\x1b\u202e\u2066") == "a\\x00b\\x1b\\u202e\\u2066"
    assert shown("👩‍👩‍👧 line\nbreak") == "👩‍👩‍👧 line\nbreak"
    assert shown(None) == ""


def test_wrong_requests_are_refused(hostile_job: Job, tmp_path: Path) -> None:
    for to in (tmp_path, tmp_path / "no" / "r.html"):
        with pytest.raises(RequestError, match="--to"):
            make_report(ReportRequest(hostile_job.out, tuple(hostile_job.shards), to))
    other = make_shard(tmp_path / "o.tar", [("a.jpg", make_image_bytes())])
    with pytest.raises(RequestError, match="none of these shards"):
        make_report(ReportRequest(hostile_job.out, (other,), tmp_path / "r.html"))


def test_without_the_plotting_library_one_line_says_what_to_install(
    hostile_job: Job, tmp_path: Path
) -> None:
    (tmp_path / "hidden" / "matplotlib").mkdir(parents=True)
    (tmp_path / "hidden" / "matplotlib" / "__init__.py").write_text("raise ImportError('no')")
    from tests.commands import REPOSITORY

    done = captionjob(
        *("report", str(hostile_job.out), "--shards", hostile_job.shards[0]),
        cwd=tmp_path,
        extra={"PYTHONPATH": f"{tmp_path / 'hidden'}:{REPOSITORY}"},
    )
    assert done.returncode == 2
    assert "pip install 'captionjob[report]'" in done.stderr
    assert done.stderr.count("\n") == 1
