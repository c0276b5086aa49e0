"""The proxy hurts connections where its plan says so, and passes the others whole."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from scripts.cluster.fault_proxy import Fault, FaultProxy

BODY = bytes(range(256)) * 1000


@pytest.fixture
def target() -> Iterator[tuple[str, int]]:
    """A server that sends BODY to whoever connects, after reading one byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1)
                        connection.sendall(BODY)
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def fetch(proxy: FaultProxy) -> tuple[bytes, str]:
    """Return what came, and how it ended."""
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), 1) as connection:
            connection.sendall(b"?")
            while data := connection.recv(65536):
                got += data
    except OSError as error:
        return got, type(error).__name__
    return got, "end"


def test_each_connection_takes_the_next_fault_and_those_after_the_last_are_whole(
    target: tuple[str, int],
) -> None:
    plan = [Fault("fin", 1000), None, Fault("rst", 0), Fault("stall", 50, stall_seconds=5)]
    with FaultProxy(target, plan) as proxy:
        assert fetch(proxy) == (BODY[:1000], "end")
        assert fetch(proxy) == (BODY, "end")
        assert fetch(proxy)[1] == "ConnectionResetError"
        assert fetch(proxy) == (BODY[:50], "TimeoutError")
        assert fetch(proxy) == (BODY, "end")
        assert (proxy.num_connections, proxy.num_faults) == (5, 3)


def test_a_refusing_proxy_is_a_dead_server_until_it_admits_again(target: tuple[str, int]) -> None:
    with FaultProxy(target) as proxy:
        proxy.refuse()
        assert fetch(proxy) == (b"", "ConnectionResetError")
        proxy.admit()
        assert fetch(proxy) == (BODY, "end")
