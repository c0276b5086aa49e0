"""A checkpoint's own tokenizer, by the `tokenizers` library: text to ids and back.

Special tokens are read from the template's text and never from a user's: a caption job gets
its texts from files that nobody checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from pipeline.errors import CheckpointError, SampleError

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class FramedText:
    """A final prompt in three parts: what the template says, and the user's text inside it."""

    before: str
    text: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.text}{self.after}"


class TextTokenizer:
    """Thread-safe; `named` are the special tokens that templates know (`bos_token`, …)."""

    def __init__(self, tokenizer: Tokenizer, named: Mapping[str, str], chat_template: str = ""):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.named = dict(named)
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        # What a model cannot spell becomes <unk>, which says nothing to the network.
        self._unknown = self.named.get("unk_token", "<unk>")
        self._added_ids = frozenset(added) - {tokenizer.token_to_id(self._unknown)}
        self.special_tokens = frozenset(token.content for token in added.values())

    @classmethod
    def load(cls, folder: Path, extra: Iterable[str] = ()) -> TextTokenizer:
        """Read `tokenizer.json` and `tokenizer_config.json` of a folder.

        `extra` are special tokens to append, each with the next free id unless it is known.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a broken file
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        config = read_json(folder / "tokenizer_config.json")
        _add_listed(tokenizer, config)
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in extra])
        named = {**read_json(folder / "special_tokens_map.json"), **config}
        found = {name: _content(named[name]) for name in NAMED if named.get(name)}
        for name, value in named.items():
            if name.endswith("_token") and isinstance(value, (str, dict)):
                found[name] = _content(value)
        template = config.get("chat_template")
        return cls(tokenizer, found, template if isinstance(template, str) else "")

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, where the checkpoint names one."""
        return self.named.get("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text, where the checkpoint names one."""
        token = self.named.get("eos_token")
        return None if token is None else self.id_of(token)

    def id_of(self, token: str) -> int | None:
        """Return the id of one token, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def wanted_id(self, token: str) -> int:
        """Return the id of a token that the family needs; CheckpointError where it is missing."""
        found = self.id_of(token)
        if found is None:
            raise CheckpointError(f"the tokenizer has no token {token!r}, which the family needs")
        return found

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; special tokens are read from it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are letters like any other."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in tokenizer.model.tokenize(word)]

    def encode_framed(self, framed: FramedText, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a prompt; special tokens count in the template's parts alone.

        A text that holds none gets exactly the ids of the whole prompt read at once. Otherwise
        what stands between the template's nearest special tokens is read as plain text.
        """
        if not self._mentions_special(framed.text):
            return self.encode(str(framed), add_special_tokens=add_special_tokens)
        frame = self._tokenizer.encode(framed.before + "x" + framed.after, add_special_tokens=False)
        place = len(framed.before)
        ends = [
            span
            for token, span in zip(frame.ids, frame.offsets, strict=True)
            if self._is_added(token)
        ]
        start = max((stop for _, stop in ends if stop <= place), default=0)
        stop = min(
            (begin for begin, _ in ends if begin > place), default=place + 1 + len(framed.after)
        )
        head = self.encode(framed.before[:start], add_special_tokens=add_special_tokens)
        tail_start = stop - place - 1
        middle = self.encode_plain(framed.before[start:] + framed.text + framed.after[:tail_start])
        if not self._added_ids.isdisjoint(middle):
            raise SampleError("special_token", "the prompt's text holds a special token")
        return head + middle + self.encode(framed.after[tail_start:])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _is_added(self, token: int) -> bool:
        return token in self._added_ids

    def _mentions_special(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._unknown in text or not self._added_ids.isdisjoint(ids)


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wanted a JSON object")
    return value


def _add_listed(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json lacks, in id order."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for _, facts in sorted(listed.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(facts["content"]) is None:
            flags = {
                key: bool(facts.get(key, False))
                for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            tokenizer.add_tokens([AddedToken(facts["content"], **flags)])


def _content(token: object) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        raise CheckpointError(f"tokenizer_config.json: {token!r} is no token; wanted a string")
    return token
