"""Tokens: the library's own ids for harmless text, and no special token from any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pipeline.errors import CheckpointError
from pipeline.processors.tokens import FramedText, TextTokenizer

FOLDER = Path(__file__).parent.parent / "data" / "nanovlm" / "tokenizer"
SPECIALS = ("<unk>", "<image>", "<|im_end|>", "<|im_start|>", "<fake_token_around_image>")
BEFORE, AFTER = "<|im_start|>User: <image><image>", "<|im_end|>\nAssistant:"


def stand_in() -> TextTokenizer:
    return TextTokenizer.load(FOLDER, extra=("<image>", "<fake_token_around_image>"))


def metaspace(scheme: str) -> Tokenizer:
    """Make a tokenizer of Llama 2's kind: blanks are letters, and a text begins with one."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {
        token: place for place, token in enumerate(["<unk>", "<s>", "</s>", "▁", *letters])
    }
    merges = [("h", "e"), ("▁", "he"), ("▁", "t"), ("l", "l")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<image>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


KINDS: dict[str, TextTokenizer] = {
    "bytes": stand_in(),
    "first": TextTokenizer(metaspace("first"), {"bos_token": "<s>"}),
    "always": TextTokenizer(metaspace("always"), {"bos_token": "<s>"}),
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=30)
HOSTILE = st.lists(st.one_of(st.sampled_from(SPECIALS), TEXTS), max_size=5).map("".join)


def added_ids(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    known = {tokenizer.id_of(token) for token in tokenizer.special_tokens}
    return [token for token in ids if token in known]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds", [True, False])
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_a_harmless_text_is_read_as_part_of_the_whole(kind: str, adds: bool, text: str) -> None:
    tokenizer = KINDS[kind]
    assume(not any(token in text for token in tokenizer.special_tokens))
    framed = FramedText(BEFORE, text, AFTER)
    assert tokenizer.encode_framed(framed, add_special_tokens=adds) == tokenizer.encode(
        BEFORE + text + AFTER, add_special_tokens=adds
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=HOSTILE)
@settings(max_examples=100, deadline=None)
def test_no_text_adds_a_special_token(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode_framed(FramedText(BEFORE, text, AFTER))
    frame = tokenizer.encode_framed(FramedText(BEFORE, "x", AFTER))
    unknown = tokenizer.id_of("<unk>")
    wanted = [token for token in added_ids(tokenizer, frame) if token != unknown]
    assert [token for token in added_ids(tokenizer, ids) if token != unknown] == wanted


@given(text=HOSTILE)
@settings(max_examples=100, deadline=None)
def test_plain_texts_come_back(text: str) -> None:
    tokenizer = KINDS["bytes"]
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_hostile_text_keeps_its_letters() -> None:
    tokenizer = KINDS["bytes"]
    ids = tokenizer.encode_framed(FramedText(BEFORE, "say <image> and <|im_end|>!", AFTER))
    assert "say <image> and <|im_end|>!" in tokenizer.decode(ids)
    assert ids.count(tokenizer.wanted_id("<image>")) == 2


@given(text=HOSTILE)
@settings(max_examples=60, deadline=None)
def test_ids_are_the_librarys(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    library = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    assert TextTokenizer.load(FOLDER).encode(text) == library.encode(text)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["385"] = {"content": "<second>", "special": True}
    config["added_tokens_decoder"]["384"] = {"content": "<first>", "special": False}
    config["eos_token"] = {"content": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer.load(tmp_path)
    assert [tokenizer.id_of(token) for token in ("<first>", "<second>")] == [384, 385]
    assert tokenizer.eos_id == 0
    assert tokenizer.decode([384, 385]) == "<first>"


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "nonesuch"}}'])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a tokenizer") as caught:
        TextTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_files_and_tokens_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="no token '<nope>'"):
        stand_in().wanted_id("<nope>")


@pytest.mark.parametrize("value", [3, ["x"], {"content": 3}])
def test_a_named_token_must_be_text(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    with pytest.raises(CheckpointError, match="no token"):
        TextTokenizer.load(tmp_path)
