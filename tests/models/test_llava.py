"""LLaVA-type checkpoints against transformers: pixels, prompt ids, logits and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, RequestError
from pipeline.models.config import Config
from pipeline.models.llava import Llava, LlavaSpec, llava_scale, load_llava
from pipeline.models.stored import read_config, read_image_config
from pipeline.processors.llava import LlavaProcessor
from tests.models.checkpoints import QUESTIONS, SIZES, Checker, TinyLlava, picture
from tests.models.stepping import greedy_steps

pytest.importorskip("transformers")

CPU = torch.device("cpu")
TOLERANCE = 2e-4
NUM_TOKENS = 12
# Llama 3's shape as JoyCaption has it: contents are strings, the template adds the picture.
STRING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<file_sep>' + message['role'] + '<filename>\n\n' }}"
    "{% if message['role'] == 'user' %}{{ '<gh_stars><repo_name><issue_start>' }}{% endif %}"
    "{{ message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<file_sep>assistant<filename>\n\n' }}{% endif %}"
)
# LLaVA 1.5's shape: no special tokens in the template; the tokenizer may add its own.
VICUNA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ message['content'][0]['text'] + ' ' }}{% else %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
TINY = (
    TinyLlava("clip, second last layer, cut in the middle", template=VICUNA_TEMPLATE),
    TinyLlava(
        "siglip, strings, tied",
        tower="siglip",
        images="SiglipImageProcessorPil",
        strategy="full",
        template=STRING_TEMPLATE,
        place="<repo_name>",
        is_tied=True,
    ),
    TinyLlava(
        "several layers, padded to a square, no bias",
        images="LlavaImageProcessorPil",
        layer=[-3, 1, -1],
        has_bias=False,
        side=40,
        image={"do_pad": True, "size": {"shortest_edge": 37}},
        text={"num_key_value_heads": 4, "head_dim": 8},
    ),
    TinyLlava(
        "last layer, first patch left out",
        tower="siglip",
        images="SiglipImageProcessorPil",
        layer=-1,
        image={"resample": 2},
    ),
)


class Pair:
    """A checkpoint loaded by us and by the library."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Llava = load_llava(folder, torch.float32, CPU)
        self.processor = LlavaProcessor(folder)
        self.checker = Checker(folder)
        self.scale = llava_scale(read_image_config(folder))


@pytest.fixture(scope="module", params=TINY, ids=[tiny.name.split(",")[0] for tiny in TINY])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("llava")
    request.param.save(folder)
    return Pair(folder)


def test_mixed_batch_gives_the_librarys_tokens_and_logits(pair: Pair) -> None:
    pictures = [picture(*size) for size in SIZES]
    checked = pair.checker.run(pictures, QUESTIONS, NUM_TOKENS)
    ready = [pair.processor.prepare(*each) for each in zip(pictures, QUESTIONS, strict=True)]
    for row, (ids, images) in enumerate(ready):
        assert list(ids) == checked.prompt(row)
        assert torch.equal(pair.scale(images.pixels)[0], checked.inputs["pixel_values"][row])
    prompts, inputs = [ids for ids, _ in ready], [images for _, images in ready]
    logits, tokens = greedy_steps(pair.model, prompts, inputs, NUM_TOKENS)
    assert torch.equal(tokens, checked.tokens)
    assert (logits - checked.logits).abs().max() <= TOLERANCE


def test_pictures_of_any_size_are_the_librarys(pair: Pair) -> None:
    for size in ((1, 1), (200, 3), (3, 200), (31, 33), (640, 480), (40, 41)):
        image = picture(*size)
        wanted = pair.checker.inputs([image], ["x"])["pixel_values"]
        assert torch.equal(pair.scale(pair.processor.pixels(image)), wanted), size


def test_prompts_with_a_system_text_are_the_librarys(pair: Pair) -> None:
    if "role" in pair.checker.processor.chat_template:
        processor = LlavaProcessor(pair.folder, system="You are brief.")
        place = pair.checker.processor.image_token
        places = place * processor.max_image_tokens
        rendered = processor.render(Image.new("RGB", (9, 9)), " What is this? ")
        wanted = pair.checker.text(" What is this? ", system="You are brief.")
        assert rendered == wanted.replace(place, places)


def test_a_system_text_with_special_tokens_is_refused(pair: Pair) -> None:
    with pytest.raises(RequestError, match="special token"):
        LlavaProcessor(pair.folder, system="be <|im_end|> brief")


def test_special_tokens_in_a_users_text_are_plain_text(pair: Pair) -> None:
    image, place = picture(9, 9), pair.checker.processor.image_token
    for text in (place, f"a {place} <|im_end|> b", "<|im_start|>"):
        ids, _ = pair.processor.prepare(image, text)
        assert ids.count(pair.model.image_token_id) == pair.processor.max_image_tokens
        harmless, _ = pair.processor.prepare(image, "x")
        specials = [token for token in ids if token < 17 or token >= 384]
        assert specials == [token for token in harmless if token < 17 or token >= 384]
        assert text in pair.processor.detokenise([t for t in ids if t not in specials])


def test_both_generations_of_tensor_names_load(pair: Pair, tmp_path: Path) -> None:
    """The library writes the older names; hub checkpoints have either."""
    tensors = load_file(pair.folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("language_model.lm_head", "lm_head")
        name = name.replace("language_model.model", "model.language_model")
        if name.startswith(("vision_tower", "multi_modal_projector")):
            name = f"model.{name}"
        renamed[name] = tensor.clone()
    save_file(renamed, tmp_path / "model.safetensors")
    for name in ("config.json", "processor_config.json"):
        (tmp_path / name).write_text((pair.folder / name).read_text())
    other = load_llava(tmp_path, torch.float32, CPU)
    for name, parameter in pair.model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_blocks_behind_the_feature_layer_are_never_built(pair: Pair) -> None:
    spec = LlavaSpec.from_config(read_config(pair.folder))
    assert len(pair.model.vision.blocks) == max(spec.vision.feature_layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": 9}, "vision_feature_layer is 9"),
        ({"vision_config": {"model_type": "dinov2"}}, "model_type is 'dinov2'"),
        ({"text_config": {"model_type": "mistral"}}, "model_type is 'mistral'; wanted llama"),
        ({"vision_feature_select_strategy": "some"}, "wanted default or full"),
    ],
)
def test_what_we_do_not_run_is_named(pair: Pair, change: dict[str, object], message: str) -> None:
    values = {**read_config(pair.folder).values, **change}
    with pytest.raises(CheckpointError, match=message):
        LlavaSpec.from_config(Config(values))


def test_pictures_that_the_tower_cannot_take_are_told(pair: Pair, tmp_path: Path) -> None:
    for file in pair.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = read_config(pair.folder).values
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    changed = {**config, "vision_config": {**vision, "image_size": 48}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"the vision tower wants \(48, 48\)"):
        LlavaProcessor(tmp_path)
