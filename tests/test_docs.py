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


def commands_of(group: click.Group, names: str = "") -> dict[str, click.Command]:
    """Return all commands by their names, those of groups too: `launch`, `launch slurm`."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[f"{names}{name}"] = command
        if isinstance(command, click.Group):
            found |= commands_of(command, f"{names}{name} ")
    return found


ALL = commands_of(cli)
COMMANDS = sorted(ALL)


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
    command = command_of(words)
    for word in words[2:]:
        if word == "--":  # behind it are options of the job that a launcher starts
            command = ALL["run"]
        elif word.startswith("--"):
            assert word.partition("=")[0] in options_of(command), " ".join(words)


def command_of(words: list[str]) -> click.Command:
    """Return the command that a command line calls, of a group the one in it."""
    command = ALL[words[1]]
    if isinstance(command, click.Group) and not words[2].startswith("-"):
        return ALL[" ".join(words[1:3])]
    return command


def test_commands_in_the_readme_exist() -> None:
    for words in shown_commands(README):
        if words[1] in ("--help", "--version"):
            continue
        check_words(words)


def test_options_in_the_readme_exist() -> None:
    known = set().union(*(options_of(command) for command in ALL.values()))
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
    command = ALL[name]
    text = command.help or ""
    assert re.search(r"Examples?:", text)
    shown = shown_commands(text)
    assert shown
    for words in shown:
        assert " ".join(words[1:]).startswith(name)
        check_words(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_that_is_no_number_says_what_it_does(name: str) -> None:
    for parameter in ALL[name].params:
        if isinstance(parameter, click.Option) and parameter.type not in (click.INT, click.FLOAT):
            assert parameter.help, parameter.name


def test_the_help_tells_the_exit_codes() -> None:
    for code in (EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, EXIT_AGAIN):
        assert re.search(rf"^  {code} ", EXIT_CODES, re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "test",
        "check",
        "torture",
        "image-suites",
        "fuzz-images",
        "cluster-test",
        "bench-reading",
        "environment.sh",
    ],
)
def test_scripts_say_what_they_are_for(name: str) -> None:
    path: Path = REPOSITORY / "scripts" / name
    assert len(path.read_text().splitlines()[1]) > 20 or path.suffix == ".sh"
