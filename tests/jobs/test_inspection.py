"""`captionjob inspect`: what is in shards, in a table or as JSON, and exit code 1 for damage."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from pipeline.fixtures import make_image_bytes, make_photo_shard, make_shard
from tests.commands import captionjob


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a plain shard, an odd one, and one that was cut."""
    make_photo_shard(tmp_path / "a.tar", 6)
    link = tarfile.TarInfo("link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "x.jpg"
    make_shard(
        tmp_path / "b.tar",
        [
            ("x.jpg", make_image_bytes(width=64, height=48, seed=1)),
            ("x.txt", b"text"),
            ("x.jpg", make_image_bytes("PNG", width=8, height=4)),
            ("same.jpg", make_image_bytes(seed=0)),  # as the first of a.tar
            ("empty.jpg", b""),
            ("odd.jpg", b"8BPS" + bytes(99)),
            ("bad.jpg", b"no picture"),
            ("head.jpg", b"\xff\xd8\xff nothing more"),
            (link, b""),
            ("__MACOSX/._x.jpg", b"?"),
            ("red\x1b[31m.jpg", make_image_bytes(seed=9)),
        ],
    )
    (tmp_path / "c.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:5000])
    return tmp_path


def test_all_that_is_asked_for_is_in_the_json(here: Path) -> None:
    done = captionjob("inspect", "--shards", "{a,b}.tar", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain, odd = found["shards"]
    assert plain["formats"] == {"JPEG": 6}
    assert plain["fields"] == {"txt": 6}
    assert plain["smallest"] == plain["largest"] == [32, 24]
    assert plain["bytes"] == (here / "a.tar").stat().st_size
    assert plain["faults"] == plain["junk"] == {}
    assert odd["samples"] == 9
    assert odd["formats"] == {"JPEG": 4, "PNG": 1, "PSD": 1, "unknown": 1}
    assert (odd["smallest"], odd["largest"]) == ([8, 4], [64, 48])
    assert odd["faults"] == {
        "empty": 1,
        "unsupported": 1,
        "unreadable": 1,
        "header not read": 1,
        "link": 1,
    }
    assert odd["junk"] == {"__MACOSX": 1}
    assert odd["repeated_keys"] == 1
    assert odd["repeated_images"] == 1
    assert found["total"] == {
        "shards": 2,
        "samples": 15,
        "faults": 5,
        "junk": 1,
        "repeated_images": 1,
        "damaged": 0,
    }


def test_the_table_has_a_line_a_shard_and_lines_for_what_is_odd(here: Path) -> None:
    done = captionjob("inspect", "--shards", "*.tar", cwd=here)
    assert done.returncode == 1, done.stderr
    head, first, *lines = done.stdout.splitlines()
    assert head.split() == ["shard", "samples", "bytes", "smallest", "largest", "formats"]
    assert first.split()[:2] == ["a.tar", "6"]
    assert first.endswith("32x24       32x24  6 JPEG")
    text = "\n".join(lines)
    assert "duplicates: 1 repeated key" in text
    assert "duplicates: 1 repeated image" in text
    assert "junk: 1 __MACOSX" in text
    assert "DAMAGED: damaged at byte" in text
    assert lines[-1] == "3 shards, 17 samples, 5 faults, 1 junk member, 1 damaged"


def test_damage_is_exit_code_1_in_json_too_unless_it_is_forgiven(here: Path) -> None:
    whole = (here / "a.tar").read_bytes()
    end = len(whole.rstrip(b"\0")) + 511 & ~511
    (here / "d.tar").write_bytes(whole[:end])  # no end marker
    damaged = captionjob("inspect", "--shards", "d.tar", "--json", cwd=here)
    assert damaged.returncode == 1
    (shard,) = json.loads(damaged.stdout)["shards"]
    assert "no end-of-archive marker" in shard["damage"]
    assert captionjob("inspect", "--shards", "d.tar", "--lenient-end", cwd=here).returncode == 0
    run = ("run", "--shards", "d.tar", "--model", "scripted", "--out")
    assert captionjob(*run, "strict", cwd=here).returncode == 1
    lenient = captionjob(*run, "lenient", "--lenient-end", cwd=here)
    assert lenient.returncode == 0, lenient.stderr
    assert "6 images captioned" in lenient.stdout


def test_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    make_shard(tmp_path / "a\x1b[31m.tar", [("a.\x1b]0;x\x07", b""), ("a.jpg", b"\x1b[2J")])
    done = captionjob("inspect", "--shards", ".", cwd=tmp_path)
    assert done.returncode == 0
    assert "\\x1b[31m" in done.stdout
    assert not {char for char in done.stdout + done.stderr if not char.isprintable()} - {"\n"}
