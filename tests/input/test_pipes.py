"""Commands as shards: only where allowed, never by a shell, and never a short one for whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.errors import RequestError, ShardError
from pipeline.fixtures import make_image_bytes, make_photo_shard, make_tar_bytes
from pipeline.input import pipes
from pipeline.input.identity import identify, stamp_of
from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards, open_shard
from pipeline.records import Shard
from tests.commands import captionjob


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return Path(make_photo_shard(tmp_path / "a.tar", 5))


def keys_of(pattern: str) -> list[str]:
    (shard,) = expand_shards([pattern], allow_pipe=True)
    return [sample.ref.key for sample in read_shard(shard)]


def test_a_command_that_ends_well_is_a_shard(tar: Path) -> None:
    wanted = [f"{i:05d}" for i in range(5)]
    assert keys_of(f"pipe:cat {tar}") == wanted
    assert keys_of(f"pipe:sh -c 'cat {tar} | cat'") == wanted


def test_a_command_without_leave_is_refused(tar: Path) -> None:
    with pytest.raises(RequestError, match="--allow-pipe"):
        expand_shards([f"pipe:cat {tar}"])


def test_an_url_in_a_file_never_becomes_a_command(tmp_path: Path) -> None:
    """Only `expand_shards` makes a Shard with a command; a url alone is refused."""
    marker = tmp_path / "ran"
    with pytest.raises(RequestError, match="refused"):
        open_shard(Shard("x", f"pipe:touch {marker}"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "command",
    ["cat a.tar | head", "cat a.tar; rm a.tar", "cat a.tar && ls", "cat < a.tar", "cat a;touch b"],
)
def test_what_only_a_shell_knows_is_refused_in_one_line(command: str) -> None:
    with pytest.raises(RequestError, match="without a shell") as caught:
        expand_shards([f"pipe:{command}"], allow_pipe=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pattern", "message"), [("pipe:", "no command"), ("pipe:cat 'a", "quot")])
def test_a_command_that_makes_no_sense_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        expand_shards([pattern], allow_pipe=True)


def test_words_reach_the_command_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a $HOME `x` *.tar"
    path.write_bytes(make_tar_bytes([("b.jpg", make_image_bytes())]))
    assert keys_of(f"pipe:cat '{path}'") == ["b"]


def test_braces_stand_for_one_command_each() -> None:
    shards = expand_shards(["pipe:curl -sf https://h/{000..002}.tar"], allow_pipe=True)
    assert [shard.command for shard in shards] == [
        ("curl", "-sf", f"https://h/{i:03d}.tar") for i in range(3)
    ]
    assert [shard.id[:4] for shard in shards] == ["000-", "001-", "002-"]
    assert shards[0].size is None
    assert identify(shards[0]).sha256 != identify(shards[1]).sha256
    assert stamp_of(shards[0]) == (0, 0)


FAILING = {
    "a bad exit": ("print('no such key', file=sys.stderr); sys.exit(22)", "exit code 22.*no such"),
    "killed": ("os.kill(os.getpid(), 9)", "exit code -9"),
    "cut, and good": ("", "header cut"),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_command_that_fails_after_its_output_is_a_failed_shard(tar: Path, what: str) -> None:
    """With the whole tar written: the exit status alone tells. The last one writes half of it."""
    code, message = FAILING[what]
    size = "" if code else "[:3000]"
    script = (
        f"import os,sys; sys.stdout.buffer.write(open('{tar}','rb').read(){size}); "
        f"sys.stdout.flush(); {code}"
    )
    words = (sys.executable, "-c", script)
    with pytest.raises(ShardError, match=message):
        list(read_shard(Shard("x", "pipe:x", command=words)))


def test_a_command_that_is_not_there_is_a_failed_shard() -> None:
    with pytest.raises(ShardError, match="cannot be started"):
        list(read_shard(Shard("x", "pipe:x", command=("no-such-command",))))


def test_leaving_early_ends_the_command() -> None:
    file = open_shard(Shard("x", "pipe:x", command=("yes",)))
    assert file.read(4) == b"y\ny\n"
    file.close()
    file.close()
    assert file.closed


def test_a_command_that_closes_its_output_and_stays_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipes, "EXIT_SECONDS", 0.2)
    words = ("sh", "-c", "exec >&-; sleep 30")
    with (
        open_shard(Shard("x", "pipe:x", command=words)) as file,
        pytest.raises(OSError, match="on"),
    ):
        file.read(10)


def test_a_run_over_commands_and_its_rerun(tar: Path) -> None:
    run = ("run", "--shards", "pipe:cat a.tar", "--out", "out", "--model", "scripted")
    refused = captionjob(*run, cwd=tar.parent)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    done = captionjob(*run, "--allow-pipe", cwd=tar.parent)
    assert done.returncode == 0, done.stderr
    assert "5 images captioned" in done.stdout
    again = captionjob(*run, "--allow-pipe", cwd=tar.parent)
    assert "1 done" in again.stderr
    failed = captionjob(*run[:2], "pipe:cat no.tar", *run[3:], "--allow-pipe", cwd=tar.parent)
    assert failed.returncode == 1
    assert "exit code 1 and said: cat: no.tar" in failed.stdout
