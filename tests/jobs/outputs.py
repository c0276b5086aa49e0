"""Small jobs with hostile names and captions, made by the real run with fixed answers."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config import RunConfig
from jobs.run import Run
from pipeline.backends import scripted
from pipeline.captioner import SamplingSettings
from pipeline.fixtures import make_image_bytes, make_shard
from pipeline.output.store import CommitSettings
from pipeline.records import Caption, Request

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
HOSTILE: Mapping[str, str] = {
    "plain": "a dog on a beach",
    "<b>bold<b>": SCRIPT,
    "right\u202eleft": "\u202egnp.exe \u200f\u2067 marks \u2069",
    "bell\x07and\x1b[31m": "bell \x07, escape \x1b[31m, line\nbreak, tab\t, nul-free",
    "long": "word " * 2000,
    "../../escape": '"; DROP TABLE rows; -- \', =cmd|"/c calc"!A1',
    "/absolute": "{{ 7 * 7 }} {% raw %} </textarea> ]]> <!-- &amp;",
    "dots.in.key": "émoji 👩‍👩‍👧 and 中文, ٣",
    "folder/deep": "  blanks around  ",
    "con": "\ufeffbom, \u2028 line separator, \ud7ff",
    "empty": "",
}
NUM_CAPTIONED = len(HOSTILE)


def hostile_members() -> list[tuple[str | tarfile.TarInfo, bytes]]:
    """Return the members of a shard: hostile keys, a broken picture, and one key twice."""
    members: list[tuple[str | tarfile.TarInfo, bytes]] = []
    for seed, key in enumerate(HOSTILE):
        members.append((f"{key}.jpg", make_image_bytes(seed=seed)))
        members.append((f"{key}.json", b'{"title": "t"}'))
    members.append(("broken.jpg", b"\xff\xd8\xff no picture"))
    members.append(("none.png", b""))
    members.append(("plain.jpg", make_image_bytes(seed=99)))  # the key comes a second time
    members.append(("plain.json", b"{}"))
    return members


def make_output(
    folder: Path,
    shards: list[str],
    answers: Mapping[str, str] | Callable[[Request], str] | None = None,
    **changes: object,
) -> Path:
    """Caption `shards` into `folder`; `answers` by key, or all by one function."""
    config = RunConfig(shards=tuple(shards), out=folder, model="scripted")
    original = scripted.answer

    def answer(request: Request, caption_index: int) -> Caption:
        made = original(request, caption_index)
        if answers is None:
            return made
        if callable(answers):
            return replace(made, text=answers(request))
        return replace(made, text=answers.get(request.ref.key, made.text))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "answer", answer)
        Run(replace(config, **changes)).run()  # type: ignore[arg-type]
    return folder


def make_hostile_job(folder: Path) -> tuple[Path, list[str]]:
    """Make two shards, one of hostile names, and their captions; return OUT and the shards."""
    shards = [
        make_shard(folder / "hostile.tar", hostile_members()),
        make_shard(
            folder / "second.tar",
            [(f"{i:03d}.jpg", make_image_bytes(seed=200 + i)) for i in range(20)],
        ),
    ]
    return make_output(folder / "out", shards, HOSTILE), shards


def several_captions() -> SamplingSettings:
    """Return settings that give three captions an image."""
    return SamplingSettings(num_captions=3, temperature=1.0)


def small_pieces() -> CommitSettings:
    """Return settings that commit each few rows."""
    return CommitSettings(rows=7)
