"""nginx on a free port of loopback, which serves one folder."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from scripts.cluster.install import PATH, need_programs
from scripts.cluster.seaweed import free_ports

PROGRAMS = ("nginx",)
PACKAGES = ("nginx-light",)
START_SECONDS = 10.0
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def install_nginx() -> None:
    """Install Debian's package unless nginx is there; MissingError if that cannot be done."""
    need_programs(PROGRAMS, PACKAGES)


class Nginx:
    """One server over `root`, its own files under `folder`; a context that starts and stops it."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Choose a port; nothing runs before `start`."""
        self.folder = folder
        self.root = root
        self.port = free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it in the foreground of its own process, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nginx.conf"
        config.write_text(self._config())
        binary = shutil.which("nginx", path=PATH) or "nginx"
        words = [binary, "-p", str(self.folder), "-c", str(config), "-g", "daemon off;"]
        with open(self.folder / "nginx.log", "ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/", timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"nginx did not start; see {self.folder / 'nginx.log'}")

    def stop(self) -> None:
        """End it and its worker."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def __enter__(self) -> Nginx:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _config(self) -> str:
        own = self.folder
        folders = " ".join(f"{name}_temp_path {own}/{name};" for name in _TEMPORARY)
        return f"""\
worker_processes 1;
pid {own}/nginx.pid;
error_log {own}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    {folders}
    default_type application/octet-stream;
    sendfile on;
    server {{ listen 127.0.0.1:{self.port}; root {self.root}; autoindex on; }}
}}
"""
