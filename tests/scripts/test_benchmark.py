"""The benchmark is fair: every contender captions the same pictures with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.models.int8 import what_is_missing
from scripts.benchmark import clock
from scripts.benchmark.checkpoint import load_ours, write_checkpoint
from scripts.benchmark.contest import Entry, Standing, best_settings, compete, ratio
from scripts.benchmark.exactness import check_float32, wrong_tokens
from scripts.benchmark.main import main
from scripts.benchmark.match import PAIRS
from scripts.benchmark.ours import EngineContender, uncached_logits
from scripts.benchmark.plain_loop import PlainLoop
from scripts.benchmark.rivals import RIVALS as ALL_RIVALS
from scripts.benchmark.roofline import Peaks, decode_work, prefill_work, vision_work
from scripts.benchmark.shapes import EOS_ID, SHAPES
from scripts.benchmark.stages import overhead
from scripts.benchmark.workload import Outcome, Workload, make_workload, skewed_lengths

RIVALS = ("plain", "one", "uncached")


@pytest.mark.parametrize("name", ["tiny-nanovlm", "tiny-smolvlm"])
def test_contenders_give_the_same_tokens_in_float32(name: str, tmp_path: Path) -> None:
    """Ours, a plain cache loop, one at a time, and no cache at all."""
    assert check_float32(SHAPES[name], tmp_path, RIVALS) == []


@pytest.mark.parametrize("name", ["tiny-nanovlm", "tiny-smolvlm"])
def test_transformers_gives_our_tokens_in_float32(name: str, tmp_path: Path) -> None:
    """The folder that is written is a checkpoint of the library's own SmolVLM class."""
    pytest.importorskip("transformers")
    assert check_float32(SHAPES[name], tmp_path, ("transformers", "sorted")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captions_have_the_lengths_that_were_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    """The ladder in the weights ends each caption, whatever the rounding."""
    shape = SHAPES["tiny-nanovlm"]
    model = load_ours(shape, write_checkpoint(shape, tmp_path), dtype)
    workload = make_workload(shape, 12, is_skewed=True)
    outcome = EngineContender("ours", model, dtype, slots=4, prefill=2).run(workload)
    assert tuple(len(outcome.tokens[i]) for i in range(12)) == workload.lengths
    assert all(tokens[-1] == EOS_ID for tokens in outcome.tokens.values())


def test_tokens_depend_on_the_picture(tmp_path: Path) -> None:
    """Otherwise equal tokens would say nothing of the vision tower."""
    shape = SHAPES["tiny-smolvlm"]
    model = load_ours(shape, write_checkpoint(shape, tmp_path), torch.float32)
    one, other = (make_workload(shape, 8, is_skewed=False, seed=seed) for seed in (0, 0))
    pictures = [request.images for request in other.requests]
    for request, picture in zip(other.requests, pictures[1:] + pictures[:1], strict=True):
        object.__setattr__(request, "images", picture)
    contender = EngineContender("ours", model, torch.float32, slots=4, prefill=2)
    assert contender.run(one).tokens != contender.run(other).tokens


def test_a_wrong_token_is_found(tmp_path: Path) -> None:
    """A contender that answers something else is reported, not averaged away."""
    shape = SHAPES["tiny-nanovlm"]
    model = load_ours(shape, write_checkpoint(shape, tmp_path), torch.float32)
    workload = make_workload(shape, 2, is_skewed=False)
    right = EngineContender("ours", model, torch.float32, slots=2, prefill=2)
    entries = [
        Entry("ours", right, 2, "float32"),
        Entry("liar", _Liar(right), 2, "float32"),
    ]
    standings = compete(workload, entries, 1, lambda line: None)
    assert wrong_tokens(model, workload, standings) == [
        "WRONG: liar: 1 of 2 captions equal in float32"
    ]


class _Liar:
    """Changes the second token of the first caption."""

    name = "liar"

    def __init__(self, honest: EngineContender) -> None:
        self._honest = honest

    def run(self, workload: Workload) -> Outcome:
        honest = self._honest.run(workload)
        first, second, *rest = honest.tokens[0]
        return Outcome({**honest.tokens, 0: (first, second + 1, *rest)}, honest.seconds)


def test_lengths_are_skewed() -> None:
    """Median 40, some at 256, alike for any number of images."""
    for num_images in (32, 96, 256):
        lengths = sorted(skewed_lengths(num_images, 256))
        assert 38 <= lengths[num_images // 2] <= 44
        assert lengths[-1] > 180
        assert sum(lengths) / num_images == pytest.approx(54, abs=2)


def test_a_subset_has_lengths_like_the_whole() -> None:
    """A slow contender's share is no easier than the others'."""
    workload = make_workload(SHAPES["tiny-nanovlm"], 96, is_skewed=True)
    part = workload.subset(8)
    assert len(part) == 8
    assert part.num_tokens / 8 == pytest.approx(workload.num_tokens / 96, rel=0.1)


def test_the_best_setting_of_a_rival_plays_on() -> None:
    """Batch sizes are tried once; ratios are taken round by round."""
    contender = _Liar.__new__(_Liar)
    ours, slow, fast = (Standing(Entry(r, contender, 1, "float32")) for r in ("a", "b", "b"))
    ours.rates, slow.rates, fast.rates = [4.0, 2.0, 3.0], [1.0], [2.0, 1.0, 1.5]
    assert best_settings([ours, slow, fast]) == [ours, fast]
    assert ratio(ours, fast) == 2.0


def test_work_is_counted_as_on_paper() -> None:
    """nanoVLM-222M: 17.5 GMAC a picture, 134 M weights a token."""
    shape = SHAPES["nanovlm-222m"]
    vision = vision_work(shape, 1, torch.bfloat16)
    assert vision.flops == pytest.approx(35.2e9, rel=0.02)
    assert vision.bytes_read == pytest.approx(2 * (85.5e6 + 1.77e6), rel=0.01)
    step = decode_work(shape, 1, 0, torch.bfloat16)
    assert step.flops == pytest.approx(2 * 134.5e6, rel=0.01)
    assert decode_work(shape, 1, 100, torch.bfloat16).bytes_read - step.bytes_read == 100 * 23_040
    prompt = prefill_work(shape, [100], torch.bfloat16)
    assert prompt.flops == pytest.approx(2 * (100 * 106.2e6 + 28.3e6), rel=0.05)
    assert step.least_seconds(Peaks(flops=1e15, bytes_read=1e9)) == pytest.approx(0.269, rel=0.01)


def test_a_step_of_the_engine_alone_is_measured() -> None:
    """With a network that answers at once, 64 slots cost some milliseconds at most."""
    assert 0 < overhead(256) < 0.1


def test_the_clock_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued before the clock is read has ended by then."""
    waited: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(clock, "_device", gpu)
    assert clock.now() > 0
    assert waited == [gpu]
    clock.measure_on(torch.device("cpu"))
    clock.now()
    assert len(waited) == 1


def test_a_gpu_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, and nothing measured on something else."""
    with pytest.raises(SystemExit):
        main(["--workload", "tiny", "--device", "cuda:99"])
    assert "--device is cuda:99; torch sees" in capsys.readouterr().err


def test_networks_of_rivals_put_all_they_make_on_the_device(tmp_path: Path) -> None:
    """The meta device stands in for a GPU: it takes no tensor of another one."""
    shape, meta = SHAPES["tiny-smolvlm"], torch.device("meta")
    folder = write_checkpoint(shape, tmp_path)
    workload = make_workload(shape, 2, is_skewed=True).shortened(2)
    with pytest.raises(NotImplementedError, match="copy out of meta"):  # its tokens, at the end
        PlainLoop(shape, folder, torch.float32, meta).generate(workload)
    ours = load_ours(shape, folder, torch.float32, meta)
    pictures = [request.images for request in workload.requests if request.images is not None]
    logits = uncached_logits(
        ours, list(workload.requests[0].prompt_ids), ours.encode_images(pictures)[0]
    )
    assert logits.device == meta


def test_our_8_bit_form_plays_beside_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has captions of its own, which are no mistake, and a column of its own."""
    if what_is_missing(torch.float32):
        pytest.skip("no fast 8-bit products here")
    options = "--workload tiny --rivals captionjob-int8 --dtype float32 --rounds 1 --images 6"
    threads = ["--threads", str(torch.get_num_threads()), "--device", "cpu"]
    assert main([*options.split(), *threads, "--work", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "captionjob, 8 bit" in values["tiny"]["images_per_second"]
    assert values["ratios"]["tiny"].keys() == {"captionjob-int8"}
    for times in values["tiny"]["milliseconds"].values():
        assert times.keys() == {"captionjob", "captionjob-int8", "roofline"}


def test_the_two_8_bit_forms_are_compared_with_each_other() -> None:
    assert ("captionjob-int8", "openvino-int8") in {(ours, theirs) for ours, theirs, _ in PAIRS}
    assert {"captionjob-int8", "openvino-int8"} <= set(ALL_RIVALS)


def test_the_last_line_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole run on the tiny shape, as a script would read it."""
    options = "--workload tiny --rivals one,plain --dtype float32 --rounds 1 --images 6 --slots 3"
    threads = ["--threads", str(torch.get_num_threads()), "--device", "cpu"]
    assert main([*options.split(), *threads, "--work", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["ratios"]["tiny"]) == {"one", "plain"}
    assert last["tiny"]["tokens_per_second"] > last["tiny"]["images_per_second"]["captionjob"]
    assert set(last["tiny"]["memory_speed_share"]) == {"1", "8", "32", "64"}
    assert 0 < last["tiny"]["slots_busy"] <= 1
