"""A processor of the transformers library, for families that have none of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from pipeline.errors import CheckpointError, SampleError
from pipeline.processors.placeholders import check_system


def _nested(images: Sequence[Image.Image]) -> list[Any]:
    return [[image] for image in images]


class ForeignProcessor:
    """Wraps an `AutoProcessor`: chats to text, batches of text and pictures to tensors."""

    default_prompt = "Describe this image."

    def __init__(self, processor: Any, *, system: str | None = None) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        added = {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
        self.special_tokens = frozenset(token for token in added if len(token.strip()) > 1)
        self._system = check_system(system, self.special_tokens)
        self._forms: list[Callable[[Sequence[Image.Image]], list[Any]]] = [_nested, list]
        self._is_plain = not getattr(processor, "chat_template", None)
        if self._is_plain and system is not None:
            raise CheckpointError("this checkpoint has no chat template; wanted no --system")
        self.chat_text("x")

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's end token."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    def chat_text(self, prompt: str) -> str:
        """Return the final text of a prompt; special tokens in it are broken by a blank.

        Without a chat template it is the image token, where there is one, and the prompt.
        """
        prompt = self._harmless(prompt)
        if self._is_plain:
            image_token = getattr(self._processor, "image_token", None)
            return f"{image_token}{prompt}" if isinstance(image_token, str) else prompt
        parts = [{"type": "image"}, {"type": "text", "text": prompt}]
        system = None if self._system is None else [{"type": "text", "text": self._system}]
        try:
            text = self._rendered(parts, system)
        except Exception:  # templates raise what they like for contents that they do not read
            text = None
        if text is None or "'type'" in text:
            text = self._rendered(prompt, self._system)
        return text

    def num_text_tokens(self, text: str) -> int:
        """Count a final text's tokens, its picture's place as few."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def batch(self, texts: Sequence[str], images: Sequence[Image.Image]) -> Any:
        """Make a left-padded batch of one picture a text.

        Most processors want pictures nested by text, a few a flat list; the form that worked
        first is kept.
        """
        failure: Exception | None = None
        for form in list(self._forms):
            try:
                made = self._call(texts, form(images))
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                failure = failure or error
            else:
                self._forms = [form]
                return made
        assert failure is not None
        raise failure

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return the text of a caption's ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of a whole prompt's ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _rendered(self, content: Any, system: Any) -> str:
        chat = [{"role": "user", "content": content}]
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        text: str = self._processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        return text

    def _call(self, texts: Sequence[str], images: list[Any]) -> Any:
        bos = self._tokenizer.bos_token
        extra = {"add_special_tokens": False} if bos and texts[0].startswith(bos) else {}
        return self._processor(
            text=list(texts), images=images, padding=True, return_tensors="pt", **extra
        )

    def _harmless(self, text: str) -> str:
        # Breaking one token may, in theory, join another; a text that keeps doing so is refused.
        for _ in range(8):
            held = [token for token in self.special_tokens if token in text]
            if not held:
                return text
            for token in sorted(held, key=len, reverse=True):
                text = text.replace(token, f"{token[0]} {token[1:]}")
        raise SampleError("special_token", "the prompt's text holds a special token")
