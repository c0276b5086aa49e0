"""A template and a sample's fields make a prompt, or an error that names what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RequestError, SampleError
from pipeline.prompts import PromptTemplate, clean, fields_needed, kept_fields
from pipeline.records import Sample, SampleRef

SAMPLE = Sample(
    SampleRef("shard", 3, "a/b", "a/b.jpg"),
    b"",
    {
        "json": b'{"title": "A cat", "a": {"b": 2.5, "tags": ["x", "y"]}, "none": null, "on":true}',
        "txt": "caf\u00e9\r\n".encode(),
        "cls": b"7",
        "meta.json": b'{"Who": "me"}',
        "bad": b"\xff\xfe\x00",
        "bom": b"\xef\xbb\xbfhello",
    },
)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("Describe this.", "Describe this."),
        ("", ""),
        ("{json.title}!", "A cat!"),
        ("{json.a.b} {json.a.tags.1} {json.on}", "2.5 y true"),
        ("{json.a.tags}", '["x", "y"]'),
        ("{txt}/{cls}/{key}", "caf\u00e9/7/a/b"),
        ("{meta.json.Who} {bom}", "me hello"),
        ("{TXT}", "caf\u00e9"),
        ("{{json.title}} {{{cls}}}", "{json.title} {7}"),
    ],
)
def test_a_template_is_filled_from_the_fields(template: str, prompt: str) -> None:
    assert PromptTemplate(template).render(SAMPLE) == prompt


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a {b", "a lone '{' at character 3"),
        ("a }", "a lone '}' at character 3"),
        ("{}", "'' is not the name"),
        ("{ txt }", "' txt ' is not the name"),
        ("{txt:>10}", "'txt:>10' is not the name"),
        ("{txt!r}", "'txt!r' is not the name"),
        ("{json.}", "'json.' is not the name"),
        ("{json[0]}", "is not the name"),
        ("{a{b}}", "a lone '{'"),
    ],
)
def test_what_is_no_template_is_refused_when_it_is_built(template: str, message: str) -> None:
    with pytest.raises(RequestError, match="--prompt") as caught:
        PromptTemplate(template)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{caption}", "missing_field"),
        ("{json.nothing}", "missing_field"),
        ("{json.none}", "missing_field"),
        ("{json.a.tags.9}", "missing_field"),
        ("{json.title.x}", "missing_field"),
        ("{bad}", "bad_field"),
        ("{broken.json.x}", "bad_field"),
        ("{deep.json.x}", "bad_field"),
        ("{long.json.x}", "bad_field"),
    ],
)
def test_a_sample_without_the_field_is_an_error_row(template: str, code: str) -> None:
    fields = {
        **SAMPLE.fields,
        "broken.json": b"{",
        "deep.json": b"[" * 100_000,
        "long.json": b"1" * 10_000,
    }
    with pytest.raises(SampleError) as caught:
        PromptTemplate(template).render(Sample(SAMPLE.ref, b"", fields))
    assert caught.value.code == code


def test_control_characters_never_reach_a_prompt() -> None:
    sample = Sample(SAMPLE.ref, b"", {"txt": b"a\x1b[31mb\n\nc\x00\t d\xe2\x80\xae"})
    assert PromptTemplate("{txt}").render(sample) == "a[31mb c d"


@given(st.text())
def test_a_cleaned_text_is_one_line_and_can_be_written(text: str) -> None:
    found = clean(text)
    found.encode()
    assert "\n" not in found
    assert all(ord(char) >= 32 for char in found)


def test_a_template_says_which_fields_it_needs() -> None:
    assert PromptTemplate("{json.a} {json.b} {txt} {key}").needs_fields == {"json", "txt"}
    assert PromptTemplate("plain").needs_fields == frozenset()
    assert fields_needed(["meta.json.x", "key", "cls"]) == {"meta.json", "cls"}


def test_kept_fields_are_text_or_none_and_never_an_error() -> None:
    names = ["json.title", "json.a", "txt", "cls", "caption", "bad", "key"]
    assert kept_fields(SAMPLE, names) == {
        "json.title": "A cat",
        "json.a": '{"b": 2.5, "tags": ["x", "y"]}',
        "txt": "caf\u00e9",
        "cls": "7",
        "caption": None,
        "bad": None,
        "key": "a/b",
    }
    with pytest.raises(RequestError):
        kept_fields(SAMPLE, ["json..x"])


@given(st.dictionaries(st.sampled_from(["txt", "json"]), st.binary(max_size=40)))
def test_any_bytes_are_a_value_or_none(fields: dict[str, bytes]) -> None:
    kept = kept_fields(Sample(SAMPLE.ref, b"", fields), ["txt", "json", "json.a", "json.0"])
    for value in kept.values():
        if value is not None:
            value.encode()
