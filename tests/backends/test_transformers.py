"""The transformers backend: foreign families, the same rows, and every row's own end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.backends.checkpoint_source import checkpoint_source
from pipeline.captioner import Captioner, SamplingSettings, SpeedSettings
from pipeline.errors import CheckpointError, SampleError
from pipeline.records import Caption, ImageFacts, SampleRef
from tests.backends.sources import ListSource
from tests.models.checkpoints import (
    QUESTIONS,
    SIZES,
    Checker,
    TinyIdefics3,
    TinyLlava,
    picture,
    quiet,
    save_paligemma,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FAMILIES = ("paligemma", "llava with a qwen2 decoder")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("foreign")
    if request.param == "paligemma":
        save_paligemma(place)
    else:
        TinyLlava("qwen2", text={"model_type": "qwen2"}).save(place)
    return place


def load(
    folder: Path,
    sampling: SamplingSettings | None = None,
    *,
    backend: str = "auto",
    batch: int = 4,
    system: str | None = None,
) -> Captioner:
    with quiet():
        source = checkpoint_source(
            str(folder), backend=backend, dtype="float32", device="cpu", system=system
        )
        return source.load(
            sampling or SamplingSettings(max_new_tokens=8, max_repeats=0),
            SpeedSettings(slots=16, prefill_batch=batch, threads=1),
        )


def captions(
    captioner: Captioner, questions: Sequence[str] = QUESTIONS, sizes: Any = SIZES
) -> list[Caption]:
    requests = [
        captioner.prepare(
            SampleRef("s", index, f"k{index}", "m.png"), ImageFacts(), picture(*size), question, {}
        )
        for index, (size, question) in enumerate(zip(sizes, questions, strict=True))
    ]
    found = list(captioner.caption(ListSource(requests)))
    return sorted(found, key=lambda each: (each.request.ref.index, each.caption_index))


def checked(folder: Path, num_tokens: int) -> tuple[list[list[int]], list[float]]:
    """Run each row alone with the library's own greedy search."""
    checker = Checker(folder)
    tokens, means = [], []
    for size, question in zip(SIZES, QUESTIONS, strict=True):
        with torch.inference_mode(), quiet():
            inputs = checker.processor(
                text=[foreign_text(checker, question)],
                images=[[picture(*size)]],
                return_tensors="pt",
                **special(checker, foreign_text(checker, question)),
            )
            found = checker.model.generate(
                **inputs,
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        row = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = torch.stack(found.logits)[:, 0].log_softmax(dim=-1)
        tokens.append(row)
        means.append(float(logprobs[range(num_tokens), row].mean()))
    return tokens, means


def foreign_text(checker: Checker, question: str) -> str:
    if checker.processor.chat_template is None:
        return f"<image>{question}"
    return checker.text(question)


def special(checker: Checker, text: str) -> dict[str, bool]:
    bos = checker.processor.tokenizer.bos_token
    return {"add_special_tokens": False} if text.startswith(bos) else {}


def test_batches_give_the_librarys_own_tokens(folder: Path) -> None:
    wanted, means = checked(folder, 8)
    found = captions(load(folder))
    decode = Checker(folder).processor.tokenizer.decode
    for caption, tokens, mean in zip(found, wanted, means, strict=True):
        if 2 in tokens:
            tokens = tokens[: tokens.index(2)]
        assert caption.error is None
        assert caption.text == decode(tokens, skip_special_tokens=True).strip()
        if 2 not in tokens and caption.finish_reason == "length":
            assert caption.num_caption_tokens == 8
            assert caption.mean_logprob == pytest.approx(mean, abs=2e-4)


def test_batch_size_changes_no_caption(folder: Path) -> None:
    sampling = SamplingSettings(max_new_tokens=8, temperature=0.9, top_p=0.95, num_captions=2)
    whole = captions(load(folder, sampling, batch=8))
    single = captions(load(folder, sampling, batch=1))
    assert len(whole) == 2 * len(SIZES)
    assert [each.text for each in whole] == [each.text for each in single]
    assert whole[0].text != whole[1].text, "two captions of one picture are drawn apart"
    other = SamplingSettings(max_new_tokens=8, temperature=0.9, top_p=0.95, num_captions=2, seed=1)
    assert [each.text for each in whole] != [each.text for each in captions(load(folder, other))]


def test_stop_strings_and_repetition_end_a_row_by_itself(folder: Path) -> None:
    plain = captions(load(folder))
    text = next(each.text for each in plain if each.text)
    stop = text[1:3]
    sampling = SamplingSettings(max_new_tokens=8, max_repeats=0, stop=(stop,))
    for before, after in zip(plain, captions(load(folder, sampling)), strict=True):
        assert before.text is not None
        if stop in before.text:
            assert after.finish_reason == "stop"
            assert after.text == before.text.split(stop)[0].strip()
        else:
            assert after.text == before.text


def test_shortest_captions_hold_back_the_end(folder: Path) -> None:
    sampling = SamplingSettings(max_new_tokens=8, min_new_tokens=8, max_repeats=0)
    assert {each.num_caption_tokens for each in captions(load(folder, sampling))} == {8}


def test_a_sample_that_the_library_refuses_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captioner: Any = load(folder)
    call = captioner._processor._processor.__class__.__call__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any("detail" in text for text in kwargs["text"]):
            raise ValueError("this one\ncannot be done")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(captioner._processor._processor.__class__, "__call__", refuse)
    found = captions(captioner)
    assert [each.error for each in found] == [None, None, "processor_failed", None]
    assert found[2].error_detail == "ValueError: this one"
    wanted = captions(load(folder), QUESTIONS[:2], SIZES[:2])
    assert [each.text for each in found[:2]] == [each.text for each in wanted]


def test_special_tokens_in_a_users_text_are_broken(folder: Path) -> None:
    captioner = load(folder)
    preview = captioner.preview(picture(32, 32), "a <image> b <|im_end|>")
    places = Checker(folder).processor.tokenizer.convert_tokens_to_ids("<image>")
    assert "< image>" in preview.text
    assert "< |im_end|>" in preview.text
    assert preview.ids.count(places) in (15, 16)


def test_a_long_prompt_costs_its_row(folder: Path) -> None:
    captioner = load(folder, SamplingSettings(max_new_tokens=4, max_text_tokens=40))
    with pytest.raises(SampleError, match="prompt_too_long"):
        captions(captioner, ["word " * 100], SIZES[:1])


def test_counters_add_up(folder: Path) -> None:
    captioner = load(folder, batch=3)
    found = captions(captioner)
    counters = captioner.counters
    assert counters.new_tokens == sum(each.num_caption_tokens for each in found)
    assert counters.prompt_tokens == sum(each.num_prompt_tokens for each in found)
    assert counters.prefills == 2
    assert counters.busy_slot_steps <= counters.total_slot_steps


@pytest.mark.parametrize(
    "tiny",
    [TinyIdefics3("both backends"), TinyLlava("both backends")],
    ids=["idefics3", "llava"],
)
def test_both_backends_give_the_same_rows(tmp_path: Path, tiny: Any) -> None:
    tiny.save(tmp_path)
    sampling = SamplingSettings(max_new_tokens=10, temperature=0.7, top_k=20, num_captions=2)
    rows = {}
    for backend in ("native", "transformers"):
        captioner = load(tmp_path, sampling, backend=backend, system="Be brief.")
        rows[backend] = captions(captioner)
    for ours, theirs in zip(rows["native"], rows["transformers"], strict=True):
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        assert ours.num_prompt_tokens == theirs.num_prompt_tokens
        assert ours.num_caption_tokens == theirs.num_caption_tokens
        assert ours.mean_logprob == pytest.approx(theirs.mean_logprob, abs=2e-4)


def test_a_system_text_without_a_template_is_refused(tmp_path: Path) -> None:
    save_paligemma(tmp_path)
    with pytest.raises(CheckpointError, match="no chat template"):
        load(tmp_path, system="Be brief.")


def test_an_unknown_model_type_is_one_line(tmp_path: Path) -> None:
    TinyLlava("unknown").save(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llava"', '"nonesuch"'))
    with pytest.raises(CheckpointError, match="refuses it") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_weights_are_one_line(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layers.0.self_attn.q_proj.weight" in name)
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor .*q_proj\.weight"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(tmp_path)


def test_pictures_reach_the_network_as_they_are() -> None:
    from pipeline.backends.transformers import TextRequest, _picture
    from pipeline.records import ImageInputs

    image = picture(20, 10)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    request = TextRequest(SampleRef("s", 0, "k", "m"), ImageFacts(), (), ImageInputs(pixels))
    assert _picture(request).tobytes() == image.tobytes()
