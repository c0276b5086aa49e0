"""Chat templates: rendered as transformers renders them, and a user's text kept out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError
from pipeline.processors.chat import IMAGE_MARK, TEXT_MARK, ChatTemplate
from pipeline.processors.texts import chat_template, image_chat_frame
from pipeline.processors.tokens import TextTokenizer

FOLDER = Path(__file__).parent.parent / "data" / "nanovlm" / "tokenizer"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "tokens": (
        "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }}:{{ m['content'] }};{% endfor %}"
    ),
    "loop controls": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ {'a': '<é>'} | tojson(indent=2) }}",
    "blocks": (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    ),
    "none": "{% if tools %}x{% endif %}{% if documents is none %}y{% endif %}{{ unknown }}",
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What's <this>?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_the_library(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    wanted, _ = render_jinja_template(
        conversations=[CHAT],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **TOKENS,
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(CHAT) == wanted[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('this template wants a tool') }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template fails"):
        ChatTemplate(source, TOKENS).render(CHAT)


def test_a_template_that_is_none_is_told() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate("{% for %}", TOKENS)


def test_a_frame_is_split_where_the_text_will_stand() -> None:
    frame = ChatTemplate(CHATML, TOKENS).frame(f"{IMAGE_MARK}{TEXT_MARK}", "Be brief.")
    assert str(frame.fill(" {{ 1 }} <b> ", "[I]")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n[I] {{ 1 }} <b> <|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not frame.strips_text


def test_a_template_that_strips_texts_strips_each() -> None:
    frame = ChatTemplate(TEMPLATES["tokens"], TOKENS).frame(TEXT_MARK)
    assert frame.strips_text
    assert str(frame.fill("  a b \n")) == "<s>a b</s>"


@pytest.mark.parametrize(
    "source", ["nothing", "{{ messages[0].content }}{{ messages[0].content }}"]
)
def test_a_template_must_say_the_text_once(source: str) -> None:
    with pytest.raises(CheckpointError, match="exactly once"):
        ChatTemplate(source, TOKENS).frame(TEXT_MARK)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "{% for part in messages[-1].content %}{% if part.type == 'image' %}<image>"
            "{% else %}{{ part.text }}{% endif %}{% endfor %}",
            "[I]hi",
        ),
        ("<image>{{ messages[-1].content }}", "[I]hi"),
        ("{{ messages[-1].content }}", "[I]\nhi"),
    ],
    ids=["parts", "a string and a picture", "a string alone"],
)
def test_pictures_stand_where_each_kind_of_template_puts_them(source: str, wanted: str) -> None:
    frame = image_chat_frame(ChatTemplate(source, TOKENS), "<image>", None)
    assert str(frame.fill("hi", "[I]")) == wanted


def test_a_template_that_drops_the_system_text_is_told() -> None:
    template = ChatTemplate("<image>{{ messages[-1].content }}", TOKENS)
    with pytest.raises(CheckpointError, match="and a system prompt"):
        image_chat_frame(template, "<image>", "Be brief.")


def test_templates_are_found_newest_first(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(FOLDER)
    with pytest.raises(CheckpointError, match="no chat template"):
        chat_template(tmp_path, tokenizer)
    tokenizer.chat_template = "of the tokenizer"
    assert chat_template(tmp_path, tokenizer) == "of the tokenizer"
    (tmp_path / "processor_config.json").write_text('{"chat_template": "of the processor"}')
    assert chat_template(tmp_path, tokenizer) == "of the processor"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of its own"}')
    assert chat_template(tmp_path, tokenizer) == "of its own"
    (tmp_path / "chat_template.jinja").write_text("raw")
    assert chat_template(tmp_path, tokenizer) == "raw"
