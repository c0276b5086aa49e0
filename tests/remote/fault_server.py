"""An HTTP server on loopback that fails as told; it speaks enough S3 for reading and listing.

Each GET of an object takes the next `Fault` of the schedule, if there is one.
"""

from __future__ import annotations

import hashlib
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Fault:
    """What one answer does: `cut`, `reset`, `stall`, `trickle`, `chunks` or `torn` after so many
    bytes of the body, `beheaded` after so many of the headers, `status`, `page`, `redirect`, or
    `replace` the object first."""

    kind: str
    after: int = 0
    status: int = 503
    headers: tuple[str, ...] = ()


@dataclass
class Store:
    """The objects, how they are served, and what was asked."""

    objects: dict[str, bytes] = field(default_factory=dict)  # by path, such as /bucket/a.tar
    schedule: list[Fault | None] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)  # no byte from there on ever comes
    has_ranges: bool = True
    has_etags: bool = True
    has_length: bool = True
    is_chunked: bool = False
    password: str = ""  # of HTTP basic, if one is wanted
    may_list: bool = True
    bytes_per_second: float = 0.0  # of each connection
    asked: list[str] = field(default_factory=list)  # "GET /a.tar bytes=5-" ...
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def next_fault(self) -> Fault | None:
        with self.lock:
            return self.schedule.pop(0) if self.schedule else None


@contextmanager
def serving(store: Store) -> Iterator[Store]:
    """Serve on a free port until the end of the block."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                while _answer(store, self):
                    pass
            except (OSError, ValueError):
                pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        store.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield store
        finally:
            server.shutdown()


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _answer(store: Store, handler: socketserver.StreamRequestHandler) -> bool:
    """Read one request and answer it; False if the connection is over."""
    line = handler.rfile.readline().decode("latin-1").split()
    if len(line) < 2:
        return False
    headers: dict[str, str] = {}
    while (header := handler.rfile.readline().decode("latin-1").strip()) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    method, target = line[0], line[1]
    store.asked.append(" ".join([method, target, headers.get("range", "")]).strip())
    answer = _Answer(store, handler, method, headers)
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    if store.password and headers.get("authorization", "") != store.password:
        return answer.status(401)
    if "list-type" in query:
        return answer.listing(parts.path, {name: values[0] for name, values in query.items()})
    return answer.object(unquote(parts.path))


@dataclass
class _Answer:
    store: Store
    handler: socketserver.StreamRequestHandler
    method: str
    asked: dict[str, str]

    def object(self, path: str) -> bool:
        fault = self.store.next_fault() if self.method == "GET" else None
        if fault and fault.kind == "status":
            return self.status(fault.status, fault.headers)
        if fault and fault.kind == "redirect":
            return self.status(302, fault.headers)
        if fault and fault.kind == "page":
            page = b"<!DOCTYPE html><html>Please log in</html>"
            return self.send(200, ["Content-Type: text/html", f"Content-Length: {len(page)}"], page)
        if fault and fault.kind == "replace":
            self.store.objects[path] = bytes(reversed(self.store.objects[path]))
        data = self.store.objects.get(path)
        if data is None:
            return self.status(404)
        if path in self.store.broken and self.asked.get("range") != "bytes=0-0":
            begin = re.match(r"bytes=(\d+)", self.asked.get("range", ""))
            place = self.store.broken[path] - int(begin[1] if begin else 0)
            fault = Fault("cut", max(0, place))
        return self.whole_or_part(data, fault)

    def whole_or_part(self, data: bytes, fault: Fault | None) -> bool:
        store, tag = self.store, etag_of(data)
        if self.asked.get("if-match", tag) != tag:
            return self.status(412)
        headers = [f"ETag: {tag}"] if store.has_etags else []
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.asked.get("range", ""))
        code = 200
        if match and store.has_ranges and self.asked.get("if-range", tag) == tag:
            begin, end = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
            if begin >= len(data):
                return self.status(416, (f"Content-Range: bytes */{len(data)}",))
            code = 206
            headers.append(f"Content-Range: bytes {begin}-{end - 1}/{len(data)}")
            data = data[begin:end]
        if store.is_chunked or (fault and fault.kind in ("chunks", "torn")):
            headers.append("Transfer-Encoding: chunked")
        elif store.has_length:
            headers.append(f"Content-Length: {len(data)}")
        return self.send(code, headers, data, fault)

    def send(self, code: int, headers: list[str], data: bytes, fault: Fault | None = None) -> bool:
        is_chunked = "Transfer-Encoding: chunked" in headers
        has_end = is_chunked or any(one.startswith("Content-Length") for one in headers)
        if not has_end:
            headers = [*headers, "Connection: close"]
        head = "\r\n".join([f"HTTP/1.1 {code} Whatever", *headers, "", ""])
        if fault and fault.kind == "beheaded":
            self.handler.wfile.write(head.encode("latin-1")[: fault.after])
            return False
        self.handler.wfile.write(head.encode("latin-1"))
        if self.method == "HEAD":
            return True
        kind = fault.kind if fault else ""
        is_hurt = kind in ("cut", "reset", "stall", "trickle", "chunks", "torn")
        body = data[: fault.after] if fault and is_hurt else data
        self.body(body, is_chunked=is_chunked)
        if kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.handler.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.handler.request.close()
        elif kind == "stall":
            self.handler.request.settimeout(30)
            self.handler.rfile.read(1)  # until the client gives up
        elif kind == "trickle":
            for place in range(len(body), len(data)):
                self.handler.wfile.write(data[place : place + 1])
                time.sleep(0.02)
        elif is_chunked and kind != "torn":
            self.handler.wfile.write(b"0\r\n\r\n")
        return has_end and kind in ("", "chunks", "replace")

    def body(self, data: bytes, *, is_chunked: bool) -> None:
        step = 20_000 if is_chunked or self.store.bytes_per_second else len(data)
        for begin in range(0, len(data), step or 1):
            part = data[begin : begin + step]
            if self.store.bytes_per_second:
                time.sleep(len(part) / self.store.bytes_per_second)
            if is_chunked:
                part = f"{len(part):x}\r\n".encode() + part + b"\r\n"
            self.handler.wfile.write(part)

    def status(self, code: int, headers: tuple[str, ...] = ()) -> bool:
        names = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 503: "SlowDown"}
        text = f"<Error><Code>{names.get(code, 'Other')}</Code></Error>".encode()
        return self.send(code, [*headers, f"Content-Length: {len(text)}"], text)

    def listing(self, path: str, query: dict[str, str]) -> bool:
        """Answer ListObjectsV2, three keys a page."""
        if not self.store.may_list:
            return self.status(403)
        bucket = f"{path.rstrip('/')}/"
        prefix, token = query.get("prefix", ""), query.get("continuation-token", "")
        keys = sorted(
            one.removeprefix(bucket) for one in self.store.objects if one.startswith(bucket)
        )
        keys = [one for one in keys if one.startswith(prefix) and one > token]
        if query.get("delimiter"):
            keys = [one for one in keys if "/" not in one[len(prefix) :]]
        page, rest = keys[:3], keys[3:]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
            f"<ETag>{escape(etag_of(data))}</ETag></Contents>"
            for key in page
            for data in [self.store.objects[bucket + key]]
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        text = (
            f"<ListBucketResult><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"
            f"{entries}{more}</ListBucketResult>"
        ).encode()
        return self.send(200, [f"Content-Length: {len(text)}"], text)
