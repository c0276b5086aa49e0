"""Fetch the suites with this machine's own pip and apt; nothing is installed or configured.

apt gets a folder of its own for lists and cache, and a source list made from the machine's own:
the same places, asked for sources as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCES = ("gdk-pixbuf", "libpng1.6", "tiff", "exiv2", "libheif")
GO_PACKAGE = "golang-1.19-src"
SUITES = ("pillow", "golang", *SOURCES)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def fetch(work: Path, only: Sequence[str] = SUITES) -> dict[str, Path]:
    """Fetch and unpack what is not there yet; return the folder of each suite."""
    folders: dict[str, Path] = {}
    for name in only:
        folder = folders[name] = work / "suites" / name
        if folder.exists():
            continue
        print(f"fetching {name}", file=sys.stderr)
        part = folder.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        how: Callable[[Path, Path], None] = {"pillow": _pillow, "golang": _golang}.get(
            name, lambda work, part, name=name: _source(work, part, name)
        )
        how(work, part)
        part.rename(folder)
    return folders


def _pillow(work: Path, part: Path) -> None:
    downloads = work / "pillow"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    _run([*command, "--no-binary", ":all:", "--dest", str(downloads), "pillow"])
    _untar(next(downloads.glob("*.tar.gz")), part, "--wildcards", "*/Tests/images/*")


def _golang(work: Path, part: Path) -> None:
    downloads = work / "deb"
    downloads.mkdir(exist_ok=True)
    _run(["apt-get", "download", GO_PACKAGE], cwd=downloads, env=_apt(work))
    _run(["dpkg-deb", "-x", str(next(downloads.glob(f"{GO_PACKAGE}_*.deb"))), str(part)])


def _source(work: Path, part: Path, name: str) -> None:
    downloads = work / "source" / name
    downloads.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "source", "--download-only", name], cwd=downloads, env=_apt(work))
    for tar in downloads.glob("*.orig*.tar.*"):
        if not tar.name.endswith(".asc"):
            _untar(tar, part)


def _apt(work: Path) -> dict[str, str]:
    """Return an environment in which apt keeps to a folder of its own; make it if needed."""
    home = work.resolve() / "apt"
    config = home / "apt.conf"
    env = {**os.environ, "APT_CONFIG": str(config), "LC_ALL": "C"}
    if (home / "updated").exists():
        return env
    for folder in ("lists/partial", "cache/archives/partial"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "sources.list").write_text("".join(_source_lines()))
    config.write_text(
        f'Dir::Etc::SourceList "{home}/sources.list";\nDir::Etc::SourceParts "-";\n'
        f'Dir::State::Lists "{home}/lists";\nDir::Cache "{home}/cache";\n'
        'APT::Sandbox::User "root";\nAcquire::Languages "none";\n'
    )
    _run(["apt-get", "update"], env=env)
    (home / "updated").touch()
    return env


def _source_lines() -> list[str]:
    """Return the machine's own Debian places, for packages and for sources."""
    form = "$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The release itself, without its updates: it is whole, and lies on every mirror.
    lines = [line.split() for line in found.splitlines() if line.startswith("Debian ")]
    places = {tuple(line[1:]) for line in lines if "-" not in line[2]}
    if not places:
        sys.exit("apt knows no Debian packages here: run `apt-get update` on a Debian machine")
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    return [
        f"{kind} {signed}{' '.join(place)}\n"
        for place in sorted(places)
        for kind in ("deb", "deb-src")
    ]


def _untar(tar: Path, folder: Path, *options: str) -> None:
    _run(["tar", "-xf", str(tar), "-C", str(folder), "--no-same-owner", *options])


def _run(
    command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}")
