"""Each alarm rings for what it is for, says how many, and is silent for an honest job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.alarms import BLANK_FILE, Alarm, AlarmBell, alarms_of, blank_captions
from jobs.blank import ask, note_blank
from jobs.results import read_output
from pipeline.backends.scripted import ScriptedSettings, ScriptedSource
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.errors import SampleError
from pipeline.fixtures import make_photo_shard
from pipeline.output.folder import open_folder
from tests.commands import captionjob
from tests.jobs.outputs import make_output

Words = Sequence[str | None]


def ring(
    captions: Words,
    *,
    finish: Callable[[int], str] = lambda place: "eos",
    prompt: str = "",
    blank: Sequence[str] = (),
) -> dict[str, Alarm]:
    """Let a bell look at rows; None is an error row."""
    numbers = range(len(captions))
    table = pa.table(
        {
            "caption": pa.array(captions, pa.string()),
            "status": ["error" if one is None else "ok" for one in captions],
            "sha256": [f"{place:064x}" for place in numbers],
            "finish_reason": [finish(place) for place in numbers],
            "key": [f"key{place}" for place in numbers],
        }
    )
    bell = AlarmBell(prompt, blank)
    bell.look(table.slice(0, 7))
    bell.look(table.slice(7))
    return {alarm.code: alarm for alarm in bell.alarms()}


def honest(count: int) -> list[str | None]:
    return [f"a picture of {place} things" for place in range(count)]


def test_an_honest_job_rings_nothing() -> None:
    errors: list[str | None] = [None] * 3
    assert ring([*honest(200), *errors, *honest(50)], prompt="Describe the picture.") == {}
    assert ring([]) == {}


def test_the_same_caption_on_many_images() -> None:
    found = ring([*honest(100), *["a dog"] * 40])
    assert list(found) == ["repeated-caption"]
    assert found["repeated-caption"].count == 40
    assert "40 different images have the caption 'a dog'" in found["repeated-caption"].message
    assert ring([*honest(100), *["a dog"] * 9]) == {}


def test_one_image_many_times_is_no_alarm() -> None:
    table = pa.table(
        {
            "caption": ["a dog"] * 50,
            "status": ["ok"] * 50,
            "sha256": ["same"] * 50,
            "finish_reason": ["eos"] * 50,
            "key": [str(place) for place in range(50)],
        }
    )
    bell = AlarmBell()
    bell.look(table)
    assert bell.alarms() == ()


@pytest.mark.parametrize(("bad", "code"), [(None, "errors"), ("", "empty"), ("  ", "empty")])
def test_a_jump_in_bad_rows(bad: str | None, code: str) -> None:
    found = ring([*honest(500), *[bad] * 60, *honest(500)])
    assert list(found) == [code]
    assert "60 of 100 in a row" in found[code].message
    assert "key5" in found[code].message
    spread = [bad if place % 20 == 0 else f"one of {place}" for place in range(1000)]
    assert ring(spread) == {}


def test_many_errors_all_along() -> None:
    found = ring([None if place % 3 == 0 else f"one of {place}" for place in range(300)])
    assert found["errors"].message == "100 of 300 rows are error (33%)"


@pytest.mark.parametrize(
    "caption",
    ["a dog<|im_end|>", "<s> a dog", "a dog</s>", "<image> dog", "[INST] dog", "ASSISTANT: a dog"],
)
def test_special_tokens(caption: str) -> None:
    found = ring([*honest(5), caption])
    assert list(found) == ["special-token"]
    assert found["special-token"].count == 1
    assert found["special-token"].examples == (caption,)


@pytest.mark.parametrize("caption", ["a < b > c", "<3 dogs", "the <b>bold</b> sign", "i|o", "[in]"])
def test_honest_signs_are_no_special_tokens(caption: str) -> None:
    assert ring([caption]) == {}


def test_the_prompt_in_a_caption() -> None:
    prompt = "Describe the {json.title} in one short line."
    found = ring(["Sure! in one short line. A dog", "a dog"], prompt=prompt)
    assert list(found) == ["prompt"]
    assert ring(["describe the dog"], prompt="Describe.") == {}


def test_captions_of_a_blank_picture() -> None:
    found = ring([*honest(5), "a white wall", "a white wall"], blank=["a white wall", ""])
    assert "2 captions are those of a blank picture" in found["blank"].message


def test_a_run_of_repetition_stops() -> None:
    run = ring(honest(200), finish=lambda place: "repetition" if 50 <= place < 56 else "eos")
    assert "6 in a row up to key55" in run["repetition"].message
    spread = ring(honest(200), finish=lambda place: "repetition" if place % 15 == 0 else "eos")
    assert spread["repetition"].count == 14
    assert ring(honest(200), finish=lambda place: "repetition" if place % 90 == 0 else "eos") == {}


def captioner(settings: str = "scripted") -> object:
    return ScriptedSource(ScriptedSettings.parse(settings)).load(
        SamplingSettings(), SpeedSettings()
    )


def test_blank_pictures_are_asked_once_and_not_counted(tmp_path: Path) -> None:
    network = captioner()
    captions = ask(network, "Describe {json.title} and {{this}}.")  # type: ignore[arg-type]
    assert 1 <= len(captions) <= 3
    assert network.counters.new_tokens == 0  # type: ignore[attr-defined]
    note_blank(network, "Describe.", open_folder(tmp_path), 19)  # type: ignore[arg-type]
    assert blank_captions(open_folder(tmp_path)) == []
    note_blank(network, "Describe.", open_folder(tmp_path), 20)  # type: ignore[arg-type]
    first = (tmp_path / BLANK_FILE).read_text()
    note_blank(network, "Another.", open_folder(tmp_path), 20)  # type: ignore[arg-type]
    assert (tmp_path / BLANK_FILE).read_text() == first


def test_a_network_that_takes_no_blank_picture_is_let_be(tmp_path: Path) -> None:
    network = captioner("scripted:fail=blank")
    with pytest.raises(SampleError):
        ask(network, "")  # type: ignore[arg-type]
    note_blank(network, "", open_folder(tmp_path), 20)  # type: ignore[arg-type]
    assert blank_captions(open_folder(tmp_path)) == []


def test_a_run_tells_its_alarms(tmp_path: Path) -> None:
    shard = make_photo_shard(tmp_path / "s.tar", 30)
    done = captionjob(
        *("run", "--shards", shard, "--out", "out", "--model", "scripted:fail=0001"),
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "ALARM errors: 11 of 30 rows are error (37%)" in done.stdout
    out = make_output(tmp_path / "same", [shard], lambda request: "always")
    output = read_output(out)
    assert alarms_of(output, []) == ()
    (alarm,) = [one for one in alarms_of(output, [output.shards[0].id]) if one.code != "blank"]
    assert alarm.count == 30
    assert (out / BLANK_FILE).exists()


def test_a_million_different_captions_take_little_memory_and_hide_no_frequent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.alarms.MAX_DISTINCT", 100)
    bell = AlarmBell()
    for i in range(5000):
        text = "always the same" if i % 20 == 0 else f"caption {i}"
        bell._look_at(text, "ok", f"hash{i}", "eos", f"key{i}")
        assert len(bell._captions) <= 100
        assert len(bell._seen) <= 200
    (alarm,) = bell.alarms()
    assert alarm.code == "repeated-caption"
    assert alarm.count == 250
