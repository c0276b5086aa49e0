"""What transformers-type checkpoints say of their texts: chat template, end tokens, frame."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.models.config import Config
from pipeline.models.stored import read_optional
from pipeline.processors.chat import IMAGE_MARK, TEXT_MARK, ChatTemplate, Content, PromptFrame
from pipeline.processors.tokens import TextTokenizer


def chat_template(folder: Path, tokenizer: TextTokenizer) -> str:
    """Find a checkpoint's chat template where the library's versions have put it, newest first."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        config = read_optional(folder, name)
        if "chat_template" in config:
            return config.text("chat_template")
    if tokenizer.chat_template:
        return tokenizer.chat_template
    raise CheckpointError(
        f"{folder} has no chat template; wanted chat_template.jinja or chat_template.json, "
        "or a chat_template in tokenizer_config.json"
    )


def eos_ids(folder: Path, config: Config, tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids that end a caption: generation_config.json's, else config's, else text's."""
    for place in (
        read_optional(folder, "generation_config.json"),
        config,
        config.section("text_config"),
    ):
        found = place.values.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        numbers = frozenset(token for token in ids if isinstance(token, int))
        if numbers:
            return numbers
    if tokenizer.eos_id is None:
        raise CheckpointError(f"{folder}: no file names an eos_token_id; captions need an end")
    return frozenset({tokenizer.eos_id})


def image_chat_frame(template: ChatTemplate, image_token: str, system: str | None) -> PromptFrame:
    """Render one picture and one text as a user's message, in the form that the template reads.

    Most templates take a list of parts. Some take a string and add the picture themselves, and
    some a string that holds the image token already.
    """
    parts: Content = [{"type": "image"}, {"type": "text", "text": TEXT_MARK}]
    system_parts: Content | None = None
    if system is not None:
        system_parts = [{"type": "text", "text": system}]
    forms: tuple[tuple[Content, Content | None], ...] = (
        (parts, system_parts),
        (TEXT_MARK, system),
        (f"{image_token}\n{TEXT_MARK}", system),
    )
    for content, system_content in forms:
        try:
            frame = template.frame(content, system_content)
        except CheckpointError:
            continue
        rendered = frame.before + frame.after
        says_system = system is None or system.strip() in rendered
        if rendered.count(image_token) == 1 and "'type'" not in rendered and says_system:
            return PromptFrame(
                frame.before.replace(image_token, IMAGE_MARK),
                frame.after.replace(image_token, IMAGE_MARK),
                frame.strips_text,
            )
    raise CheckpointError(
        f"the chat template does not say one {image_token} and one text"
        + ("" if system is None else " and a system prompt")
    )
