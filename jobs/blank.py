"""What the network says of pictures that show nothing, so that an alarm can know it again.

A network that does not see its pictures (a wrong processor, a broken decoder) says the same of
every picture as of a blank one. So at the end of a job it is asked once, of three blank ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields

from PIL import Image

from jobs.alarms import BLANK_FILE
from pipeline.captioner import Captioner, Ready
from pipeline.errors import CaptionJobError
from pipeline.output.folder import OutFolder
from pipeline.records import ImageFacts, Request, SampleRef

COLOURS = ("white", "grey", "black")
SIDE = 256
MIN_IMAGES = 20  # of a run: before that no alarm would rest on it


def note_blank(captioner: Captioner, prompt: str, out: OutFolder, num_images: int) -> None:
    """Ask once a job, and write `OUT/_blank.json`; a network that cannot answer is let be."""
    if num_images < MIN_IMAGES or out.stat(BLANK_FILE) is not None:
        return
    try:
        captions = ask(captioner, prompt)
    except CaptionJobError:
        return
    text = json.dumps({"captions": captions}, ensure_ascii=False) + "\n"
    out.replace(BLANK_FILE, text.encode("utf-8", "backslashreplace"))


def ask(captioner: Captioner, prompt: str) -> list[str]:
    """Return the captions of blank pictures; the counters stay as they were."""
    text = re.sub(r"\{[^{}]*\}", "", prompt).replace("{{", "{").replace("}}", "}")
    requests = [_request(captioner, colour, text) for colour in COLOURS]
    before = [
        (one.name, getattr(captioner.counters, one.name)) for one in fields(captioner.counters)
    ]
    answers = list(captioner.caption(Ready(requests)))
    for name, value in before:
        setattr(captioner.counters, name, value)
    return _unique([answer.text for answer in answers if answer.text])


def _request(captioner: Captioner, colour: str, text: str) -> Request:
    picture = Image.new("RGB", (SIDE, SIDE), colour)
    ref = SampleRef("", 0, f"blank-{colour}", "")
    return captioner.prepare(ref, ImageFacts(SIDE, SIDE), picture, text, {})


def _unique(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(texts))
