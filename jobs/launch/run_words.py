"""The options behind `--` of a launcher: those of `captionjob run`, read as it would read them."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.options import run_config
from jobs.plan import Plan
from pipeline.errors import RequestError

if TYPE_CHECKING:
    from jobs.config import RunConfig

# What would undo, or be undone by, the work of several workers that are started again.
REFUSED = {
    "rank": "the launcher gives each worker its own",
    "world_size": "the launcher gives it",
    "limit": "it counts the samples of the whole job, and wants one worker",
    "dry_run": "try the options with `captionjob run` first",
    "max_requeues": "it is an option of `launch slurm`",
    "overwrite": "each start of each worker would move the rows of the others aside",
}


@dataclass(frozen=True, slots=True)
class RunWords:
    """The options of a run: the words as they were given, and what they mean."""

    words: tuple[str, ...]
    options: Mapping[str, Any]
    config: RunConfig
    given: frozenset[str]  # options that stand in the words

    @classmethod
    def parse(cls, run: click.Command, words: Sequence[str]) -> RunWords:
        """Read the words as the command `run` would; click's errors and RequestError pass."""
        if not words:
            raise RequestError("no options of `captionjob run` were given; they go behind --")
        context = run.make_context("captionjob run", list(words))
        default = click.core.ParameterSource.DEFAULT
        given = {name for name in context.params if context.get_parameter_source(name) != default}
        for name, reason in REFUSED.items():
            if name in given:
                raise RequestError(f"--{name.replace('_', '-')} goes with no launcher: {reason}")
        options = {
            key: value
            for key, value in context.params.items()
            if key not in ("dry_run", "max_requeues")
        }
        return cls(tuple(words), options, run_config(options, environ={}), frozenset(given))

    def refuse(self, name: str, reason: str) -> None:
        """Raise RequestError if an option was given that this launcher has no use for."""
        if name in self.given:
            raise RequestError(f"--{name.replace('_', '-')} does not go with this: {reason}")

    def check(self) -> None:
        """Look at shards, model, prompt and output folder, as a run does before it loads.

        Raises RequestError where they would be refused.
        """
        Plan.make(self.config)

    def need_absolute(self, place: str) -> None:
        """Raise RequestError for a relative path, which names another folder elsewhere."""
        for option, texts in (("--out", (self.options["out"],)), ("--shards", self.config.shards)):
            for text in texts:
                is_elsewhere = text.startswith("/") or re.match(r"[a-z0-9+]+:", text)
                if not is_elsewhere:
                    raise RequestError(
                        f"{option} {text!r} is relative, and names another place in {place}; "
                        "wanted an absolute path or a url"
                    )

    @property
    def verify_words(self) -> tuple[str, ...]:
        """The options of `captionjob verify` that proves this run's output."""
        shards = [word for pattern in self.config.shards for word in ("--shards", pattern)]
        lenient = ["--lenient-end"] if self.config.has_lenient_end else []
        return (str(self.options["out"]), *shards, *lenient)


def command_words() -> tuple[str, ...]:
    """Return how this very captionjob is started: its script's path, or Python and a module."""
    script = shutil.which("captionjob", path=str(Path(sys.executable).parent))
    return (script,) if script else (sys.executable, "-m", "jobs")


def shell_line(words: Iterable[str]) -> str:
    """Return words as one line of a shell; RequestError for a word that none can hold."""
    found = tuple(words)
    for word in found:
        if any(char in word for char in "\0\r\n"):
            raise RequestError(f"{word!r} has a line break, which a launcher cannot pass on")
    return shlex.join(found)
