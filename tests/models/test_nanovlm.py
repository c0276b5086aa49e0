"""nanoVLM against its own code: tokens, logits and pictures that upstream produced.

The data were made with huggingface/nanoVLM 4e0c096 and its v0.1 tag on tiny random weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from pipeline.models.config import Config
from pipeline.models.nanovlm import NanoVLM, cut_tiles, filter_as_upstream, load_nanovlm
from pipeline.models.pixels import PixelScale
from pipeline.processors.nanovlm import NanoVLMProcessor, tile_grid
from pipeline.processors.tokens import TextTokenizer, read_json
from pipeline.records import ImageInputs
from tests.models.stepping import greedy_steps

DATA = Path(__file__).parent.parent / "data" / "nanovlm"
TOLERANCE = 2e-4
HEAD_CASES = (
    "single_nomask",
    "batch_leftpad",
    "solo_row0",
    "solo_row1",
    "solo_row2",
    "solo_row3",
    "rope_prefill_beyond",
    "rope_cross_in_decode",
)
TILES_PER_ROW = {"batch_leftpad": (1, 3, 0, 2)}
SOLO_V01 = ("v01_solo_row0", "v01_solo_row1", "v01_solo_row2")


def index() -> dict[str, Any]:
    return {
        **json.loads((DATA / "cases/index.json").read_text())["cases"],
        **json.loads((DATA / "cases/index_v01.json").read_text())["cases"],
    }


def case(name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / f"cases/{name}.safetensors")


@pytest.fixture(scope="module")
def tiny() -> NanoVLM:
    return load_nanovlm(DATA / "tiny", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tiny_v01() -> NanoVLM:
    return load_nanovlm(DATA / "tiny_v01", torch.float32, torch.device("cpu"))


def config_of(folder: str, **changes: Any) -> Config:
    return Config({**json.loads((DATA / folder / "config.json").read_text()), **changes})


def processor_of(folder: str, **changes: Any) -> NanoVLMProcessor:
    config = config_of(folder, **changes)
    extra = config.section("vlm_extra_tokens").values.values()
    tokenizer = TextTokenizer.load(DATA / "tokenizer", [str(token) for token in extra])
    return NanoVLMProcessor(config, tokenizer)


def prompts_of(tensors: dict[str, torch.Tensor]) -> list[list[int]]:
    """Undo the reference's left padding."""
    ids = tensors["input_ids"]
    mask = tensors.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


def images_of(tensors: dict[str, torch.Tensor], tiles: tuple[int, ...]) -> list[ImageInputs]:
    if "pixel_values" not in tensors:
        return []
    parts = tensors["pixel_values"].split(list(tiles or (len(tensors["pixel_values"]),)))
    return [ImageInputs(part) for part in parts if len(part)]


@pytest.mark.parametrize("name", HEAD_CASES)
def test_same_tokens_and_logits_as_upstream(tiny: NanoVLM, name: str) -> None:
    tensors = case(name)
    images = images_of(tensors, TILES_PER_ROW.get(name, ()))
    wanted = tensors["step_logits"]
    logits, tokens = greedy_steps(tiny, prompts_of(tensors), images, len(wanted))
    assert torch.equal(tokens, tensors["tokens"])
    assert (logits - wanted).abs().max() <= TOLERANCE


def test_vision_and_projector_give_upstreams_features(tiny: NanoVLM) -> None:
    tensors = case("single_nomask")
    with torch.inference_mode():
        vision = tiny.vision(tensors["pixel_values"])
        projected = tiny.projector(vision)
    assert (vision - tensors["vit_out"]).abs().max() <= 1e-5
    assert (projected - tensors["mp_out"]).abs().max() <= 1e-5


def test_rows_end_at_their_first_eos_where_upstream_pads_with_it(tiny: NanoVLM) -> None:
    tensors, facts = case("batch_eos"), index()["batch_eos"]
    images = images_of(tensors, TILES_PER_ROW["batch_leftpad"])
    _, tokens = greedy_steps(tiny, prompts_of(tensors), images, facts["max_new_tokens"])
    for row, wanted, first in zip(tokens, tensors["tokens"], facts["first_eos"], strict=True):
        until = facts["max_new_tokens"] if first is None else first + 1
        assert row[:until].tolist() == wanted[:until].tolist()
        assert set(wanted[until:].tolist()) <= {facts["eos"]}
        assert facts["eos"] not in row[: until - 1]


def v01_prompts(tensors: dict[str, torch.Tensor], model: NanoVLM) -> list[list[int]]:
    return [[model.image_token_id] * 16 + row for row in prompts_of(tensors)]


@pytest.mark.parametrize("name", SOLO_V01)
def test_first_generation_alone_gives_upstreams_tokens(tiny_v01: NanoVLM, name: str) -> None:
    tensors = case(name)
    logits, tokens = greedy_steps(
        tiny_v01, v01_prompts(tensors, tiny_v01), images_of(tensors, ()), 20
    )
    assert torch.equal(tokens, tensors["tokens"])
    assert (logits - tensors["step_logits"]).abs().max() <= TOLERANCE


def test_first_generation_padded_rows_equal_themselves_alone(tiny_v01: NanoVLM) -> None:
    """Upstream's padding stood between image and text there, and changed two captions of three.

    Only its longest row, which has no padding, is compared with upstream's batch.
    """
    tensors = case("v01_batch_leftpad")
    prompts = v01_prompts(tensors, tiny_v01)
    logits, tokens = greedy_steps(tiny_v01, prompts, images_of(tensors, (1, 1, 1)), 20)
    alone = [case(name) for name in SOLO_V01]
    assert torch.equal(tokens, torch.cat([each["tokens"] for each in alone]))
    wanted = torch.cat([each["step_logits"] for each in alone], dim=1)
    assert (logits - wanted).abs().max() <= TOLERANCE
    assert torch.equal(tokens[2], tensors["tokens"][2])
    assert not torch.equal(tokens[:2], tensors["tokens"][:2])


def test_sampling_filter_is_upstreams() -> None:
    tensors = case("sampling_filter")
    for name, top_k, top_p in (("k50_p09", 50, 0.9), ("k5_p1", 5, 1.0), ("k0_p05", 0, 0.5)):
        assert torch.equal(filter_as_upstream(tensors["logits"], top_k, top_p), tensors[name])
    probabilities = (filter_as_upstream(tensors["logits"], 50, 0.9) / 0.5).softmax(dim=-1)
    assert torch.equal(probabilities, tensors["probs_k50_p09_t05"])


def test_pictures_are_upstreams_bit_for_bit() -> None:
    facts = json.loads((DATA / "cases/preproc.json").read_text())
    globals_ = load_file(DATA / "cases/preproc_globals.safetensors")
    scale = PixelScale.zero_to_one()
    for name, wanted in facts.items():
        number, kind = name.split(".")
        picture = Image.open(DATA / f"cases/preproc_{number}.png")
        if kind == "v02_resize":
            processor = processor_of("tiny_v01")
            tiles = scale(processor.prepare(picture, "x")[1].pixels)[0]
        else:
            processor = processor_of("tiny", resize_to_max_side_len=kind == "max")
            tiles = cut_tiles(scale(processor.prepare(picture, "x")[1].pixels), 64)
        assert list(tiles.shape) == wanted["shape"], name
        grid = tiles
        if "global" in wanted:
            grid = tiles[1:]
            assert torch.equal(tiles[0], globals_[wanted["global"]]), name
        back = (grid * 255).round().to(torch.uint8)
        assert torch.equal(back.float() / 255, grid)
        assert hashlib.sha256(back.numpy().tobytes()).hexdigest() == wanted["sha256"], name


def test_grid_is_upstreams_at_published_sizes() -> None:
    for size in index()["preproc"]["default_config_sizes"]:
        fill = size["resize_to_max_side_len"]
        grid = tile_grid(size["w"], size["h"], tile=512, max_side=2048, fill=fill)
        assert [grid.height, grid.width] == size["new_hw"]
        assert [grid.rows, grid.columns] == size["grid"]
        assert grid.num_tiles == size["vit_images"]
        assert grid.num_tiles * 65 == size["image_string_tokens"]


@pytest.mark.parametrize(("width", "height"), [(840, 630), (728, 546), (364, 273)])
def test_grid_keeps_the_float_rounding_that_networks_were_trained_with(
    width: int, height: int
) -> None:
    grid = tile_grid(width, height, tile=512, max_side=2048, fill=True)
    assert (grid.rows, grid.columns) == (4, 4)  # exact arithmetic gives three rows


@pytest.mark.parametrize(("row", "size"), [(0, (64, 64)), (1, (128, 64))])
def test_prompt_ids_are_upstreams_for_tiles(row: int, size: tuple[int, int]) -> None:
    facts, tensors = index()["batch_leftpad"], case("batch_leftpad")
    processor = processor_of("tiny", resize_to_max_side_len=False)
    question = facts["text"][row].split("<|im_end|>")[0].split("<|image|>")[-1]
    picture = Image.new("RGB", size)
    ids, _ = processor.prepare(picture, question)
    assert list(ids) == prompts_of(tensors)[row]
    assert processor.render(picture, question) == facts["text"][row]


def test_prompt_ids_are_upstreams_for_a_prefix() -> None:
    facts, tensors = index()["v01_batch_leftpad"], case("v01_batch_leftpad")
    processor = processor_of("tiny_v01")
    for text, wanted in zip(facts["text"], prompts_of(tensors), strict=True):
        question = text.removeprefix("Question: ").removesuffix(" Answer:")
        ids, images = processor.prepare(Image.new("RGB", (30, 40)), question)
        assert list(ids) == [384] * 16 + wanted
        assert images.pixels.shape == (1, 3, 64, 64)


def second_generation() -> dict[str, Any]:
    """Change the tiny config into the 450M layout: one extra token and no chat template."""
    return {
        "lm_chat_template": None,
        "vlm_extra_tokens": {"image_token": "<|image|>"},
        "extra_token_amount": 1,
        "lm_vocab_size": 385,
        "max_img_size": None,
        "resize_to_max_side_len": None,
        "lm_eos_token_id": 0,
    }


def test_second_generation_puts_placeholders_before_the_question() -> None:
    processor = processor_of("tiny", **second_generation())
    ids, images = processor.prepare(Image.new("RGB", (300, 40)), "What is this?")
    rendered = processor.render(Image.new("RGB", (300, 40)), "What is this?")
    assert rendered == "<|image|>" * 16 + "Question: What is this? Answer:"
    assert (
        ids[:17] == (384,) * 16 + tuple(processor.tokenise("Question: What is this? Answer:"))[:1]
    )
    assert images.pixels.shape == (1, 3, 64, 64)


@pytest.mark.parametrize("text", ["<|image|>", "a <|im_end|> b", "<row_1_col_1><|im_start|>"])
def test_special_tokens_in_a_users_text_are_plain_text(text: str) -> None:
    processor = processor_of("tiny", resize_to_max_side_len=False)
    picture = Image.new("RGB", (64, 64))
    ids, _ = processor.prepare(picture, text)
    harmless, _ = processor.prepare(picture, "x")
    specials = [token for token in ids if token < 17 or token >= 384]
    assert specials == [token for token in harmless if token < 17 or token >= 384]
    assert len(ids) > len(harmless)
    plain = processor.detokenise([token for token in ids if token not in specials])
    assert text in plain


def test_old_checkpoints_may_name_the_tied_weight_either_way(tmp_path: Path, tiny: NanoVLM) -> None:
    from safetensors.torch import save_file

    tensors = load_file(DATA / "tiny/model.safetensors")
    tensors["decoder.token_embedding.weight"] = tensors.pop("decoder.head.weight")
    del tensors["decoder.rotary_embd.inv_freq"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DATA / "tiny/config.json").read_text())
    other = load_nanovlm(tmp_path, torch.float32, torch.device("cpu"))
    for name, parameter in tiny.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_tokenizer_names_the_end() -> None:
    assert processor_of("tiny").eos_ids == {2}
    assert read_json(DATA / "tokenizer/tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_pixels_may_come_as_a_whole_picture_or_as_tiles(tiny: NanoVLM) -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (90, 200, 3), dtype=np.uint8))
    _, images = processor_of("tiny").prepare(picture, "x")
    tiles = tiny.tiles(images.pixels)
    with torch.inference_mode():
        (whole,) = tiny.encode_images([images])
        (cut,) = tiny.encode_images([ImageInputs(tiles)])
    assert torch.equal(whole, cut)
    assert len(whole) == len(tiles) * 16
