"""A checkpoint's chat template, rendered in a sandbox as transformers renders it.

The template is rendered once, with marks where a sample's text and picture will stand; for each
sample the marks are filled. So a template that reads the clock gives one job one prompt, and
what a user writes never runs through the template's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import CheckpointError
from pipeline.processors.tokens import FramedText

# Private-use characters: no template and no chat writes them.
TEXT_MARK = "\uf8f1\uf8f2\uf8f1"
IMAGE_MARK = "\uf8f3\uf8f4\uf8f3"

Content = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """A rendered chat around a text's place; some templates strip the text's outer blanks."""

    before: str
    after: str
    strips_text: bool = False

    def fill(self, text: str, image: str = "") -> FramedText:
        """Put a sample's text, and its picture's tokens, into their places."""
        text = text.strip() if self.strips_text else text
        return FramedText(
            self.before.replace(IMAGE_MARK, image), text, self.after.replace(IMAGE_MARK, image)
        )


class ChatTemplate:
    """A jinja2 template with the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except JinjaError as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Content]]) -> str:
        """Return the text of a chat, with what makes the assistant answer at its end."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except JinjaError as error:
            raise CheckpointError(f"the chat template fails: {error}") from None

    def frame(self, content: Content, system: Content | None = None) -> PromptFrame:
        """Render one user message whose content holds `TEXT_MARK`; split it at the mark."""
        messages: list[Mapping[str, Content]] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        rendered = self.render([*messages, {"role": "user", "content": content}])
        before, mark, after = rendered.partition(TEXT_MARK)
        if not mark or TEXT_MARK in after:
            raise CheckpointError("the chat template does not say a user's text exactly once")
        spaced = self.render([*messages, {"role": "user", "content": _spaced(content)}])
        return PromptFrame(before, after, strips_text=f" {TEXT_MARK} " not in spaced)


def _spaced(content: Content) -> Content:
    if isinstance(content, str):
        return content.replace(TEXT_MARK, f" {TEXT_MARK} ")
    return [
        {key: value.replace(TEXT_MARK, f" {TEXT_MARK} ") for key, value in part.items()}
        for part in content
    ]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it says nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
