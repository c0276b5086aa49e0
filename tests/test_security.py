"""What a hostile shard may try: code in pickles, paths that lead out, escapes for the terminal."""

from __future__ import annotations

import ast
import os
import pickle
import unicodedata
from pathlib import Path

import pytest

from pipeline.fixtures import make_image_bytes, make_shard
from pipeline.input.pack import pack_folder
from pipeline.input.reader import read_shard
from pipeline.records import Shard
from tests.commands import REPOSITORY, captionjob

PICKLED = ("pyd", "pth", "pt", "pkl", "pickle", "npy", "npz", "cbor", "mp", "msg")
ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
HOSTILE_KEYS = ("../../out", "/abs/out", "a/../../../out", "C:\\out", "nul", f"k{ESCAPE}")


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def sources() -> list[Path]:
    return [*REPOSITORY.glob("pipeline/**/*.py"), *REPOSITORY.glob("jobs/**/*.py")]


def test_no_pickle_of_a_shard_is_ever_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    data = pickle.dumps(Bomb(marker))
    members = [("a.jpg", make_image_bytes()), *((f"a.{kind}", data) for kind in PICKLED)]
    members += [("b.jpg", data), ("c", data)]
    make_shard(tmp_path / "a.tar", members)
    kept = [word for kind in PICKLED for word in ("--keep", kind)]
    run = ["run", "--shards", "a.tar", "--out", "out", "--model", "scripted", *kept]
    done = captionjob(*run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert captionjob("inspect", "--shards", "a.tar", cwd=tmp_path).returncode == 0
    for kind in ("webdataset", "txt"):
        done = captionjob(
            *("export", "out", f"to-{kind}", "--to", kind, "--shards", "a.tar"), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "the bomb works, so that it would have been seen"


def called(source: str) -> set[str]:
    """Return the dotted names of all that is called, and of modules imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            found.update(
                f"{one.arg}=True"
                for one in node.keywords
                if isinstance(one.value, ast.Constant) and one.value.value is True
            )
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_nothing_in_the_package_can_run_what_data_says() -> None:
    """No pickle, no eval, no shell; `webdataset` only writes, its decoders are never used."""
    forbidden = {"pickle", "marshal", "shelve", "dill", "joblib", "eval", "exec", "os.system"}
    forbidden |= {"os.popen", "torch.load", "shell=True", "allow_pickle=True"}
    forbidden |= {"trust_remote_code=True", "webdataset", "webdataset.autodecode"}
    for path in sources():
        assert not called(path.read_text(encoding="utf-8")) & forbidden, path


def test_the_search_for_what_runs_code_finds_it() -> None:
    source = (
        "import pickle\ndef f():\n    os.system('x')\n    run('x', shell=True)\n    eval('1')\n"
    )
    assert called(source) >= {"pickle", "os.system", "shell=True", "eval"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `deep/er` with a shard of hostile names, and all outputs inside it."""
    here = tmp_path_factory.mktemp("top") / "deep" / "er"
    here.mkdir(parents=True)
    members = [(f"{key}.jpg", make_image_bytes(seed=i)) for i, key in enumerate(HOSTILE_KEYS)]
    make_shard(here / "a.tar", [*members, (f"bad{ESCAPE}.jpg", b"no picture")])
    run = ("run", "--shards", "a.tar", "--out", "out", "--model", "scripted")
    done = captionjob(*run, cwd=here)
    assert done.returncode == 0, done.stderr
    return here


def test_no_name_from_a_shard_leads_out_of_the_folder(hostile: Path) -> None:
    before = set(hostile.iterdir())
    places = {kind: hostile / f"export-{kind}" for kind in ("txt", "webdataset")}
    for kind, place in places.items():
        done = captionjob(
            *("export", "out", str(place), "--to", kind, "--shards", "a.tar"), cwd=hostile
        )
        assert done.returncode == 0, done.stderr
    assert set(hostile.iterdir()) - before == set(places.values())
    assert [path.name for path in hostile.parent.iterdir()] == ["er"]
    assert [path.name for path in hostile.parent.parent.iterdir()] == ["deep"]
    assert not Path("/abs").exists()
    assert len(list(places["txt"].rglob("*.jpg"))) == len(HOSTILE_KEYS)
    (tar,) = places["webdataset"].glob("*.tar")
    names = [sample.ref.member for sample in read_shard(Shard("x", str(tar)))]
    assert len(names) == len(HOSTILE_KEYS)
    for name in names:
        assert not name.startswith("/")
        assert ".." not in name.split("/")
        assert name.isprintable()


def test_pack_writes_nothing_but_its_shards(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("..jpg", "a\\..\\b.jpg", f"k{ESCAPE}.jpg", "...a.jpg"):
        (photos / name).write_bytes(make_image_bytes())
    (tmp_path / "secret.jpg").write_bytes(make_image_bytes(seed=5))
    pack_folder(photos, str(tmp_path / "s" / "p-{000..}.tar"))
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "s", "secret.jpg"}
    for sample in read_shard(Shard("x", str(tmp_path / "s" / "p-000.tar"))):
        assert not any(unicodedata.category(char) == "Cc" for char in sample.ref.member)
        assert "/" not in sample.ref.member


SHOWING = {
    "run": ("run", "--shards", "a.tar", "--out", "two", "--model", "scripted"),
    "dry run": ("run", "--shards", "a.tar", "--out", "two", "--model", "scripted", "--dry-run"),
    "inspect": ("inspect", "--shards", "a.tar"),
    "status": ("status", "out"),
    "verify": ("verify", "out", "--shards", "a.tar"),
    "verify of other shards": ("verify", "out", "--shards", "."),
    "a prompt": (
        "run",
        "--shards",
        "a.tar",
        "--out",
        "3",
        "--model",
        "scripted",
        "--prompt",
        "{\x1b",
    ),
    "a name": ("run", "--shards", f"no{ESCAPE}.tar", "--out", "4", "--model", "scripted"),
}


@pytest.mark.parametrize("what", SHOWING)
def test_no_control_character_reaches_the_terminal(hostile: Path, what: str) -> None:
    make_shard(hostile / f"b{ESCAPE}.tar", [(f"x{ESCAPE}.jpg", b"")])
    done = captionjob(*SHOWING[what], cwd=hostile)
    shown = done.stdout + done.stderr
    assert shown
    assert "Traceback" not in shown
    assert {char for char in shown if not char.isprintable()} <= {"\n"}
