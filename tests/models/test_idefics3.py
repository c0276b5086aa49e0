"""Idefics3, SmolVLM and SmolVLM2 against transformers: pixels, prompt ids, logits and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from pipeline.errors import CheckpointError
from pipeline.models.idefics3 import Idefics3, Idefics3Spec, load_idefics3
from pipeline.models.pixels import PixelScale
from pipeline.models.stored import read_config, read_image_config
from pipeline.models.vision import position_ids
from pipeline.processors.idefics3 import Idefics3Processor, TileRules
from pipeline.records import ImageInputs
from tests.models.checkpoints import QUESTIONS, SIZES, Checker, TinyIdefics3, picture
from tests.models.stepping import greedy_steps, uncached_logits

pytest.importorskip("transformers")

CPU = torch.device("cpu")
TOLERANCE = 2e-4
NUM_TOKENS = 12
TINY = (
    TinyIdefics3("split"),
    TinyIdefics3(
        "smolvlm, tied, three heads, factor 4",
        kind="smolvlm",
        tile=64,
        image_size=64,
        factor=4,
        width=48,
        heads=3,
        kv_heads=1,
        vision_heads=3,
        is_tied=True,
        image={"size": {"longest_edge": 256}},
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
    ),
    TinyIdefics3(
        "not split, tiles larger than the learned grid, sharded",
        tile=48,
        image={"do_image_splitting": False, "size": {"longest_edge": 100}},
        shard_size="60KB",
    ),
    TinyIdefics3(
        "exact size, seven patches, bilinear, not standardised, llama3 positions",
        kind="smolvlm",
        tile=56,
        image_size=56,
        factor=7,
        image={"size": {"height": 100, "width": 130}, "resample": 2, "do_normalize": False},
        text={
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    TinyIdefics3(
        "not resized first, own mean and spread, small learned grid",
        tile=32,
        image_size=24,
        image={"do_resize": False, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]},
        text={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
)


class Pair:
    """A checkpoint loaded by us and by the library."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Idefics3 = load_idefics3(folder, torch.float32, CPU)
        self.processor = Idefics3Processor(folder)
        self.checker = Checker(folder)
        self.scale = PixelScale.from_config(
            read_image_config(folder), mean=(0.5,) * 3, std=(0.5,) * 3
        )


@pytest.fixture(scope="module", params=TINY, ids=[tiny.name.split(",")[0] for tiny in TINY])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("idefics3")
    request.param.save(folder)
    return Pair(folder)


def test_mixed_batch_gives_the_librarys_tokens_and_logits(pair: Pair) -> None:
    pictures = [picture(*size) for size in SIZES]
    checked = pair.checker.run(pictures, QUESTIONS, NUM_TOKENS)
    ready = [pair.processor.prepare(*each) for each in zip(pictures, QUESTIONS, strict=True)]
    for row, (ids, images) in enumerate(ready):
        assert list(ids) == checked.prompt(row)
        wanted = checked.inputs["pixel_values"][row][: len(images.pixels)]
        assert torch.equal(pair.scale(images.pixels), wanted)
        assert not checked.inputs["pixel_values"][row][len(images.pixels) :].any()
    prompts, inputs = [ids for ids, _ in ready], [images for _, images in ready]
    logits, tokens = greedy_steps(pair.model, prompts, inputs, NUM_TOKENS)
    assert torch.equal(tokens, checked.tokens)
    assert (logits - checked.logits).abs().max() <= TOLERANCE
    assert len({tuple(row.tolist()) for row in tokens}) > 1, "rows that differ prove more"


def test_a_row_of_a_mixed_batch_equals_itself_alone(pair: Pair) -> None:
    ids, images = pair.processor.prepare(picture(*SIZES[0]), QUESTIONS[0])
    others = [pair.processor.prepare(picture(*size), QUESTIONS[2]) for size in SIZES[1:]]
    prompts = [ids, *(other for other, _ in others)]
    inputs = [images, *(other for _, other in others)]
    batched, _ = greedy_steps(pair.model, prompts, inputs, 1)
    alone = uncached_logits(pair.model, ids, [images])
    assert (batched[0, 0] - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize("real", [(3, 4), (1, 1), (4, 2)])
def test_partial_tiles_give_the_librarys_features(pair: Pair, real: tuple[int, int]) -> None:
    """No image processor pads inside a tile today; the network can, and so can we."""
    spec = pair.model.vision.spec
    side = pair.processor.tiles(picture(40, 40)).shape[-1]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, side, side, generator=generator)
    mask = torch.ones(2, side // spec.patch_size, side // spec.patch_size, dtype=torch.bool)
    mask[1, real[0] :], mask[1, :, real[1] :] = False, False
    large = mask.repeat_interleave(spec.patch_size, 1).repeat_interleave(spec.patch_size, 2)
    with torch.inference_mode():
        (ours,) = pair.model.encode_images([ImageInputs(pixels, mask)])
        theirs = pair.checker.model.model.get_image_features(
            pixel_values=pixels[None], pixel_attention_mask=large[None]
        )
    wanted = theirs.pooler_output
    wanted = torch.cat(list(wanted)) if isinstance(wanted, (list, tuple)) else wanted
    assert (ours - wanted.reshape(ours.shape)).abs().max() <= TOLERANCE


def test_prompts_with_a_system_text_are_the_librarys(pair: Pair) -> None:
    processor = Idefics3Processor(pair.folder, system="You are brief.")
    image = picture(*SIZES[1])
    rendered = processor.render(image, "What is this?")
    wanted = pair.checker.text("What is this?", system="You are brief.")
    before, after = wanted.split("<image>")
    assert rendered.startswith(before)
    assert rendered.endswith(after)
    assert rendered.count("<image>") == processor.prepare(image, "x")[0].count(
        pair.model.image_token_id
    )


def test_rules_follow_the_library_for_any_size(pair: Pair) -> None:
    for width, height in ((1, 1), (1000, 1), (1, 999), (31, 33), (127, 129), (640, 480), (97, 300)):
        image = Image.new("RGB", (width, height), (200, 100, 7))
        wanted = pair.checker.inputs([image], ["x"])
        ids, images = pair.processor.prepare(image, "x")
        assert list(ids) == wanted["input_ids"][0].tolist()
        assert torch.equal(pair.scale(images.pixels), wanted["pixel_values"][0])
        num_others = len(pair.processor.tokenise("x"))
        assert len(ids) - num_others - 12 <= pair.processor.max_image_tokens


@pytest.mark.parametrize("side", [4, 7, 14, 27, 32, 49])
@pytest.mark.parametrize("per_side", [7, 14, 27, 32])
def test_position_ids_keep_the_librarys_rounding(side: int, per_side: int) -> None:
    """49 patches over 7 or 14 positions would differ in exact arithmetic."""
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(
        hidden_size=1, num_attention_heads=1, image_size=per_side, patch_size=1
    )
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(per_side**2)[:, None])
        mask = torch.ones(1, side, side, dtype=torch.bool)
        wanted = embeddings(torch.zeros(1, 3, side, side), mask)[0, :, 0]
    assert position_ids(mask, per_side)[0].tolist() == wanted.int().tolist()


def test_special_tokens_in_a_users_text_are_plain_text(pair: Pair) -> None:
    image = picture(*SIZES[1])
    for text in ("<image>", "a <end_of_utterance> b", "<row_1_col_1><global-img>"):
        ids, _ = pair.processor.prepare(image, text)
        harmless, _ = pair.processor.prepare(image, "x")
        limit = 384  # the stand-in's special tokens have the ids before 17 and from here on
        specials = [token for token in ids if token < 17 or token >= limit]
        assert specials == [token for token in harmless if token < 17 or token >= limit]
        assert text in pair.processor.detokenise([token for token in ids if token < limit])


def test_places_of_tiles_are_written_as_smolvlm_writes_them(pair: Pair) -> None:
    """SmolVLM's own processor cannot be made here without torchvision; its function can."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    for size in SIZES:
        image = picture(*size)
        rows, columns = pair.processor.grid(image)
        per_tile = pair.processor.tokens_per_tile
        text = get_image_prompt_string(
            rows, columns, per_tile, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert text in pair.processor.render(image, "x")


def test_missing_keys_have_the_librarys_defaults() -> None:
    from transformers import Idefics3Config

    from pipeline.models.config import Config

    found = Idefics3Spec.from_config(Config({}))
    wanted = Idefics3Config()
    vision, text = wanted.vision_config, wanted.text_config
    assert found.vision.hidden_size == vision.hidden_size
    assert found.vision.intermediate_size == vision.intermediate_size
    assert found.vision.num_layers == vision.num_hidden_layers
    assert found.vision.image_size == vision.image_size
    assert found.vision.patch_size == vision.patch_size
    assert found.decoder.hidden_size == text.hidden_size
    assert found.decoder.vocab_size == text.vocab_size
    assert found.decoder.num_layers == text.num_hidden_layers
    assert found.shuffle_factor == wanted.scale_factor
    assert found.image_token_id == wanted.image_token_id
    rules = TileRules.from_config(Config({}))
    assert (rules.tile, rules.longest_edge, rules.resample) == (364, 4 * 364, 1)


def test_a_text_model_of_another_kind_is_named(pair: Pair) -> None:
    from pipeline.models.config import Config

    values = dict(read_config(pair.folder).values)
    text = values["text_config"]
    assert isinstance(text, dict)
    values["text_config"] = {**text, "model_type": "qwen2"}
    with pytest.raises(CheckpointError, match="model_type is 'qwen2'; wanted llama"):
        Idefics3Spec.from_config(Config(values))
