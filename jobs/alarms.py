"""Alarms: what a person would want to be told of a job's captions before trusting them.

Each looks at rows as they come, in shard order, and at the end says what it saw and how many.
An alarm is a hint and never an error: a folder of blank scans rightly has one caption.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from jobs.results import Output
from pipeline.output.folder import OutFolder

BLANK_FILE = "_blank.json"
COLUMNS = ("caption", "status", "sha256", "finish_reason", "key")

MIN_REPEATED = 10  # images of one caption; below, chance does it
MIN_REPEATED_SHARE = 0.02
WINDOW = 100  # rows in a row that are looked at together
MIN_BAD_SHARE = 0.2
MIN_BAD_RATIO = 3  # as bad as the rest, so often
MIN_STOPS = 5  # repetition stops one after the other
MIN_STOP_SHARE = 0.05
MIN_PROMPT = 12  # characters of a prompt's fixed part; shorter ones stand in honest captions
MAX_EXAMPLES = 5
MAX_DISTINCT = 200_000  # captions that are remembered at a time; more are not, for memory's sake

# Tokens of the usual families; real captions hardly have them.
SPECIAL_TOKEN = re.compile(
    r"<\|[a-z0-9_▁\- ]{1,40}\|>|</?s>|</?(?:pad|unk|bos|eos|image|img|mask|sep|cls|"
    r"end_of_utterance|row_\d+_col_\d+|global-img|fake_token_around_image|loc_\d+|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<<?/?SYS>>?|\b(?:USER|ASSISTANT|Human|Assistant): ",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What was seen, how often, and some examples (captions or keys)."""

    code: str
    message: str
    count: int
    examples: tuple[str, ...] = ()


@dataclass(slots=True)
class _Share:
    """Bad rows over the job, and the worst window of them."""

    what: str
    num_rows: int = 0
    num_bad: int = 0
    worst: int = 0
    worst_place: str = ""
    _window: deque[bool] = field(default_factory=deque)
    _in_window: int = 0

    def add(self, is_bad: bool, place: str) -> None:
        self.num_rows += 1
        self.num_bad += is_bad
        self._window.append(is_bad)
        self._in_window += is_bad
        if len(self._window) > WINDOW:
            self._in_window -= self._window.popleft()
        if self._in_window > self.worst:
            self.worst, self.worst_place = self._in_window, place

    def alarm(self, code: str) -> Alarm | None:
        if self.num_rows >= MIN_REPEATED and self.num_bad >= MIN_BAD_SHARE * self.num_rows:
            share = self.num_bad / self.num_rows
            message = f"{self.num_bad:,} of {self.num_rows:,} rows are {self.what} ({share:.0%})"
            return Alarm(code, message, self.num_bad)
        rest_rows, rest_bad = self.num_rows - WINDOW, self.num_bad - self.worst
        usual = rest_bad / rest_rows if rest_rows > 0 else 0.0
        if self.worst >= WINDOW * MIN_BAD_SHARE and self.worst / WINDOW >= MIN_BAD_RATIO * usual:
            message = (
                f"a jump in {self.what} rows: {self.worst} of {WINDOW} in a row up to "
                f"{self.worst_place}, {usual:.1%} elsewhere"
            )
            return Alarm(code, message, self.worst, (self.worst_place,))
        return None


class AlarmBell:
    """Looks at all rows of a job once."""

    def __init__(self, prompt: str = "", blank: Iterable[str] = ()) -> None:
        """Know the prompt's template, and the captions of blank pictures if they were made."""
        self._prompt = _fixed_part(prompt)
        self._blank = {caption.strip() for caption in blank} - {""}
        self._seen: set[int] = set()  # hashes of (caption, image), so that memory stays small
        self._captions: Counter[str] = Counter()  # caption -> different images
        self._errors, self._empty = _Share("error"), _Share("empty")
        self._special: list[str] = []
        self._echo: list[str] = []
        self._num = Counter[str]()
        self._run = self._longest_run = 0
        self._run_end = ""

    def look(self, table: pa.Table) -> None:
        """Look at rows, which have the columns of `COLUMNS`."""
        columns = [table.column(name).to_pylist() for name in COLUMNS]
        for caption, status, sha256, finish, key in zip(*columns, strict=True):
            self._look_at(caption, status, sha256, finish, key)

    def alarms(self) -> tuple[Alarm, ...]:
        """Return what was seen that a person should know."""
        found = [
            *self._repeated(),
            self._errors.alarm("errors"),
            self._empty.alarm("empty"),
            self._of("special-token", "captions have special tokens in them", self._special),
            self._of("prompt", "captions repeat the prompt", self._echo),
            self._blank_alarm(),
            self._stops(),
        ]
        return tuple(alarm for alarm in found if alarm is not None)

    def _look_at(
        self, caption: str | None, status: str, sha256: str | None, finish: str | None, key: str
    ) -> None:
        self._errors.add(status == "error", key)
        self._run = self._run + 1 if finish == "repetition" else 0
        self._num["stops"] += finish == "repetition"
        if self._run > self._longest_run:
            self._longest_run, self._run_end = self._run, key
        if status == "error":
            return
        text = (caption or "").strip()
        self._empty.add(not text, key)
        if not text:
            return
        pair = hash((text, sha256 or key))
        if pair not in self._seen:
            self._seen.add(pair)
            self._captions[text] += 1
            self._num["pairs"] += 1
        if len(self._seen) > 2 * MAX_DISTINCT or len(self._captions) > MAX_DISTINCT:
            self._forget()
        self._note("special-token", bool(SPECIAL_TOKEN.search(text)), self._special, text)
        is_echo = bool(self._prompt) and self._prompt in text.casefold()
        self._note("prompt", is_echo, self._echo, text)

    def _forget(self) -> None:
        """Forget rare captions: one that a fiftieth of all images have is never among them."""
        self._captions = Counter(dict(self._captions.most_common(MAX_DISTINCT // 2)))
        self._seen.clear()  # an image that comes again may count twice from here on

    def _note(self, code: str, is_seen: bool, examples: list[str], text: str) -> None:
        if is_seen:
            self._num[code] += 1
            if len(examples) < MAX_EXAMPLES:
                examples.append(text)

    def _repeated(self) -> Iterator[Alarm]:
        least = max(MIN_REPEATED, MIN_REPEATED_SHARE * self._num["pairs"])
        many = [(text, count) for text, count in self._captions.most_common() if count >= least]
        if many:
            text, count = many[0]
            more = f", and {len(many) - 1} more captions are that frequent" if many[1:] else ""
            message = f"{count:,} different images have the caption {_short(text)!r}{more}"
            examples = tuple(f"{count} x {text}" for text, count in many[:MAX_EXAMPLES])
            yield Alarm("repeated-caption", message, count, examples)

    def _of(self, code: str, what: str, examples: Sequence[str]) -> Alarm | None:
        count = self._num[code]
        if not count:
            return None
        message = f"{count:,} {what}, such as {_short(examples[0])!r}"
        return Alarm(code, message, count, tuple(examples))

    def _blank_alarm(self) -> Alarm | None:
        equal = {text: self._captions[text] for text in self._blank if text in self._captions}
        count = sum(equal.values())
        if not count:
            return None
        text = max(equal, key=lambda one: equal[one])
        message = f"{count:,} captions are those of a blank picture, such as {_short(text)!r}"
        return Alarm("blank", message, count, tuple(equal))

    def _stops(self) -> Alarm | None:
        count, total = self._num["stops"], self._errors.num_rows
        is_run = self._longest_run >= MIN_STOPS
        if not is_run and (count < MIN_REPEATED or count < MIN_STOP_SHARE * total):
            return None
        run = f", {self._longest_run} in a row up to {self._run_end}" if is_run else ""
        message = f"{count:,} of {total:,} captions were stopped for repeating themselves{run}"
        return Alarm("repetition", message, count, (self._run_end,))


def alarms_of(output: Output, shard_ids: Iterable[str]) -> tuple[Alarm, ...]:
    """Look at all rows of these shards that an output folder holds by now."""
    wanted = set(shard_ids)
    bell = bell_of(output)
    for shard in output.shards:
        if shard.id in wanted:
            bell.look(shard.table(COLUMNS))
    return bell.alarms()


def bell_of(output: Output) -> AlarmBell:
    """Return a bell that knows the job's prompt, and what blank pictures gave."""
    return AlarmBell(output.prompt, blank_captions(output.folder))


def blank_captions(folder: OutFolder) -> list[str]:
    """Read what the network said of blank pictures; empty if nobody asked it."""
    try:
        found = json.loads(folder.read(BLANK_FILE))
        return [str(caption) for caption in found["captions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _fixed_part(prompt: str) -> str:
    """Return the longest part of a template without fields, if it is long enough to tell."""
    parts = re.split(r"\{[^{}]*\}", prompt.casefold())
    longest = max((part.strip() for part in parts), key=len)
    return longest if len(longest) >= MIN_PROMPT else ""


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
