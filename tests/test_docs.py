"""What the README and the help say is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from jobs.cli import EXIT_CODES, cli
from jobs.result import EXIT_DONE, EXIT_FAILED, EXIT_REQUEST
from jobs.stopping import EXIT_AGAIN
from tests.commands import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(cli.commands)


def options_of(command: click.Command) -> set[str]:
    names = {"--help", "-h"}
    for parameter in command.params:
        names.update(parameter.opts)
    return names


def shown_commands(text: str) -> list[list[str]]:
    """Return the words of each `captionjob ...` line in a text, joined over backslashes."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^\s*(?:\$ )?(captionjob [a-z].*)$", joined, re.MULTILINE)
    return [shlex.split(line.partition(" #")[0]) for line in lines]


def check_words(words: list[str]) -> None:
    """Assert that a command line names a command and options that exist."""
    command = cli.commands[words[1]]
    for word in words[2:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options_of(command), " ".join(words)


def test_commands_in_the_readme_exist() -> None:
    for words in shown_commands(README):
        if words[1] in ("--help", "--version"):
            continue
        check_words(words)


def test_options_in_the_readme_exist() -> None:
    known = set().union(*(options_of(command) for command in cli.commands.values()))
    known |= {"--version"}
    mentioned = set(re.findall(r"`(--[a-z][a-z-]+)", README))
    assert mentioned <= known, mentioned - known


def test_files_in_the_readme_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / path).exists(), path
    for path in re.findall(r"`(scripts/[a-z_-]+)`", README):
        assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example_that_works(name: str) -> None:
    command = cli.commands[name]
    text = command.help or ""
    assert re.search(r"Examples?:", text)
    shown = shown_commands(text)
    assert shown
    for words in shown:
        assert words[1] == name
        check_words(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_that_is_no_number_says_what_it_does(name: str) -> None:
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option) and parameter.type not in (click.INT, click.FLOAT):
            assert parameter.help, parameter.name


def test_the_help_tells_the_exit_codes() -> None:
    for code in (EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, EXIT_AGAIN):
        assert re.search(rf"^  {code} ", EXIT_CODES, re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["demo", "test", "check", "torture", "image-suites", "fuzz-images", "environment.sh"]
)
def test_scripts_say_what_they_are_for(name: str) -> None:
    path: Path = REPOSITORY / "scripts" / name
    assert len(path.read_text().splitlines()[1]) > 20 or path.suffix == ".sh"
