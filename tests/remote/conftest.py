"""A store that fails as told, and clients that lose patience soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.fault_server import Store, serving

HASTE = {
    "CAPTIONJOB_STALL_SECONDS": "0.4",
    "CAPTIONJOB_CONNECT_SECONDS": "2.0",
    "CAPTIONJOB_ATTEMPTS": "4",
    "CAPTIONJOB_MAX_WAIT_SECONDS": "0.01",
}


@pytest.fixture
def store() -> Iterator[Store]:
    with serving(Store()) as store:
        yield store


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose patience soon, and take no proxy."""
    for name, value in HASTE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def account(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store as S3, with an account of its own."""
    values = {
        "HOME": str(tmp_path),
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-somebody",
        "AWS_ENDPOINT_URL": store.url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return store
