"""Shards that a command writes: `pipe:curl -sf https://host/00000.tar`, if the user allows it.

The command is split into words as a shell would, and run without a shell: a name from a list of
shards can never add a second command. Who wants a shell says so: `pipe:sh -c '... | ...'`. What
comes is a shard only if the command ends with exit code 0; if not, the last line of its stderr is
told. The command stands in the output's metadata, so a password has no place in it.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import tempfile
from typing import TYPE_CHECKING, BinaryIO, cast

from pipeline.errors import RequestError, ShardError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PREFIX = "pipe:"
EXIT_SECONDS = 60.0  # that a command may take to end after its last byte
_OPERATORS = frozenset("();<>|&")


def is_pipe(pattern: str) -> bool:
    """Whether a `--shards` pattern names a command."""
    return pattern.lower().startswith(PREFIX)


def words_of(pattern: str) -> tuple[str, ...]:
    """Return the words of a `pipe:` command; RequestError where only a shell would know them."""
    text = pattern[len(PREFIX) :]
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise RequestError(f"--shards {pattern!r}: {error}") from None
    if not words:
        raise RequestError(f"--shards {pattern!r} has no command")
    if any(word and set(word) <= _OPERATORS for word in words):
        raise RequestError(
            f"--shards {pattern!r} runs without a shell, which alone knows | ; & < >; "
            "wanted one command, or pipe:sh -c '...'"
        )
    return tuple(words)


def open_pipe(words: tuple[str, ...], url: str) -> BinaryIO:
    """Start the command and return what it writes; ShardError where it cannot be started."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the pipe
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, bufsize=0
        )
    except OSError as error:
        log.close()
        raise ShardError(url, f"cannot be started: {error.strerror or error}") from error
    return cast(BinaryIO, _Pipe(process, log))


class _Pipe(io.RawIOBase):
    """A command's output; the read that finds its end raises OSError unless it ended well."""

    def __init__(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        super().__init__()
        self._process = process
        self._log = log

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        assert self._process.stdout is not None
        count = int(self._process.stdout.readinto(buffer) or 0)  # type: ignore[attr-defined]
        if not count:
            self._check_end()
        return count

    def close(self) -> None:
        if not self.closed:
            if self._process.poll() is None:
                self._process.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process.wait()
            self._log.close()
        super().close()

    def _check_end(self) -> None:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise OSError(f"the command goes on {EXIT_SECONDS:.0f} s after its end") from None
        if code:
            self._log.seek(max(0, self._log.seek(0, io.SEEK_END) - 1000))
            said = self._log.read().decode("utf-8", "replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "nothing")
            raise OSError(f"the command ended with exit code {code} and said: {last[:200]}")
