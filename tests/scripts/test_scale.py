"""`scripts/scale`: stretches of a long job, and whether the last is as good as the second."""

from __future__ import annotations

import json
import os
import sys

import pytest

from scripts.benchmark.scale import Moment, Stretch, compare, cut, main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_stretches_end_between_two_looks() -> None:
    moments = [Moment(10, 20, 80, 500), Moment(20, 40, 120, 510), Moment(40, 80, 320, 520)]
    assert list(cut(moments, 100)) == [
        Stretch(100, 100 / 15, 100 / 30, 510),
        Stretch(200, 100 / 13, 100 / 26, 520),
        Stretch(300, 100 / 10, 100 / 20, 520),
    ]


def test_the_last_stretch_is_held_against_the_second() -> None:
    first, second = Stretch(1, 1.0, 1.0, 100), Stretch(2, 10.0, 5.0, 200)
    stretches = [first, second, Stretch(3, 8.0, 4.5, 250)]
    assert compare(stretches) == pytest.approx((0.25, 0.2))
    assert compare(stretches, "cpu") == pytest.approx((0.25, 0.1))


def test_a_short_job_prints_each_stretch_and_one_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--images 300 --every 100 --model scripted:latency=0.1"
    code = main([*words.split(), "--max-growth", "9", "--max-slowdown", "9"])
    *stretches, last = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in stretches] == ["100", "200", "300"]
    found = json.loads(last)
    assert found["images"] == 300
    assert found["is_flat"] is True
    assert all(rate > 0 for rate in found["images_per_second"])
    assert all(rss > 10 for rss in found["rss_mib"])


@pytest.mark.skipif(not os.environ.get("CAPTIONJOB_SCALE"), reason="minutes: CAPTIONJOB_SCALE=1")
def test_the_default_model_is_as_fast_and_as_small_at_2000_images_as_at_1000() -> None:
    assert main(["--images", "2000", "--every", "500", "--clock", "cpu"]) == 0
