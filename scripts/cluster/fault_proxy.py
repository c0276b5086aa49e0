"""A TCP proxy on loopback that hurts connections: cuts, resets and stalls them after N bytes.

    with FaultProxy(("127.0.0.1", 8333)) as proxy:
        proxy.plan = [Fault("fin", 100_000), Fault("rst", 5_000_000), Fault("stall", 0)]

Each connection takes the next fault of the plan when it has brought so many bytes back from the
server; when the plan is used up, or is None in a place, connections pass unhurt. `refuse` closes
the door altogether until `admit`. The proxy keeps no secret: it never looks at what passes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CHUNK = 64 << 10


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a connection after `after_bytes` from the server (or to it: `upward`)."""

    kind: Literal["fin", "rst", "stall"]
    after_bytes: int
    stall_seconds: float = 3600.0  # then the connection is cut
    upward: bool = False  # counts what the client sends, so that uploads can be cut too


class FaultProxy:
    """Listens on a free port and passes bytes to `target`; a context that starts and stops it."""

    def __init__(
        self,
        target: tuple[str, int],
        plan: Iterable[Fault | None] = (),
        *,
        bytes_per_second: float | None = None,
    ) -> None:
        """Listen; `bytes_per_second` throttles each connection's way back."""
        self.target = target
        self.plan: list[Fault | None] = list(plan)
        self.bytes_per_second = bytes_per_second
        self.num_connections = 0
        self.num_faults = 0
        self._lock = threading.Lock()
        self._is_open = True
        self._is_refusing = False
        self._pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    @property
    def endpoint(self) -> str:
        """The proxy's address for HTTP."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to pass connections, on threads that do not keep a process alive."""
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Close the door and every connection."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        self._listener.close()
        self._cut_all()

    def refuse(self) -> None:
        """Reset all connections, and each new one at once, as if the server were dead."""
        self._is_refusing = True
        self._cut_all()

    def admit(self) -> None:
        """Let connections pass again."""
        self._is_refusing = False

    def next_fault(self) -> Fault | None:
        """Take the plan's next entry."""
        with self._lock:
            return self.plan.pop(0) if self.plan else None

    def count_fault(self) -> None:
        """Count a fault that has happened."""
        with self._lock:
            self.num_faults += 1

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while self._is_open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self.target, 5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._lock:
                self.num_connections += 1
                self._pairs.add(pair)
            threading.Thread(target=self._run, args=(pair,), daemon=True).start()

    def _run(self, pair: _Pair) -> None:
        try:
            pair.run()
        finally:
            with self._lock:
                self._pairs.discard(pair)

    def _cut_all(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.end("rst")


class _Pair:
    """One connection and its twin to the server."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._counts = {True: 0, False: 0}  # upward, downward
        self._fault = proxy.next_fault()

    def run(self) -> None:
        """Pass bytes both ways until one side ends or the fault strikes."""
        with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError):
            selector.register(self._client, selectors.EVENT_READ, True)
            selector.register(self._server, selectors.EVENT_READ, False)
            while True:
                for key, _ in selector.select(1.0):
                    if not self._pass(upward=bool(key.data)):
                        return
        self.end("fin")

    def end(self, kind: str) -> None:
        """Close both sides, the client's by FIN or by RST."""
        if kind == "rst":
            _reset(self._client)
        else:
            with contextlib.suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
            self._client.close()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _pass(self, *, upward: bool) -> bool:
        """Pass one chunk; False once the connection is over."""
        source, sink = (self._client, self._server) if upward else (self._server, self._client)
        wanted = CHUNK
        fault = self._fault if self._fault and self._fault.upward == upward else None
        if fault:
            wanted = min(CHUNK, max(1, fault.after_bytes - self._counts[upward]))
        data = source.recv(wanted)
        if not data:
            self.end("fin")
            return False
        if fault and self._counts[upward] + len(data) > fault.after_bytes:
            return self._strike(fault)
        rate = self._proxy.bytes_per_second
        if rate and not upward:
            time.sleep(len(data) / rate)
        sink.sendall(data)
        self._counts[upward] += len(data)
        return True

    def _strike(self, fault: Fault) -> bool:
        self._fault = None
        self._proxy.count_fault()
        if fault.kind == "stall":
            self._client.settimeout(fault.stall_seconds)
            with contextlib.suppress(OSError):  # until the client goes, or the time is over
                while self._client.recv(CHUNK):
                    pass
            self.end("fin")
        else:
            self.end(fault.kind)
        return False


def _reset(connection: socket.socket) -> None:
    """Close by RST: what was not read yet is lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
