"""An S3 server in memory, for tests: what captionjob asks of a store, over real HTTP.

    with S3Server() as server:
        environment = server.environment()      # AWS_* for this process or another
        server.lose_replies = 1                 # the next write happens, its answer is lost
        server.refusals = 3                     # the next three requests get 503

Conditions are judged under one lock, as a store does. Signatures are not looked at.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

Query = dict[str, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, or a part of one."""

    data: bytes
    meta: dict[str, str]
    etag: str
    when: float


@dataclass(slots=True)
class Upload:
    """A multipart upload under way."""

    key: str
    meta: dict[str, str]
    when: float
    parts: dict[int, Stored] = field(default_factory=dict)


class S3Server:
    """Buckets in memory behind a port of loopback; a context that starts and stops it."""

    def __init__(self, *, page: int = 1000) -> None:
        """Listen; a listing has at most `page` keys."""
        self.objects: dict[str, Stored] = {}  # by bucket/key
        self.uploads: dict[str, Upload] = {}
        self.buckets = {"bucket"}
        self.page = page
        self.lose_replies = 0
        self.lose_nth_reply: int | None = None  # of the writes from now on
        self.before_answer: Callable[[], object] | None = None
        self.abort_after_parts = 0  # the next upload is gone after so many parts
        self.refuse_parts = False
        self.refusals = 0
        self.is_read_only = False
        self.log: list[str] = []  # method and key of each request
        self.lock = threading.Lock()
        self._count = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))

    def environment(self) -> dict[str, str]:
        """Return the variables that lead an S3 client here."""
        return {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "CAPTIONJOB_MAX_WAIT_SECONDS": "0.2",
        }

    def files(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below `bucket/prefix/`, by the rest of their key."""
        with self.lock:
            return {
                name.removeprefix(f"{prefix}/"): stored.data
                for name, stored in self.objects.items()
                if name.startswith(f"{prefix}/")
            }

    def put(self, name: str, data: bytes) -> None:
        """Put an object under `bucket/key`."""
        with self.lock:
            self.objects[name] = _stored(data, {})

    def begin_upload(self, name: str, upload: str, age: float = 0.0) -> None:
        """Begin a multipart upload that somebody else is about."""
        with self.lock:
            self.uploads[upload] = Upload(name, {}, time.time() - age)

    def number(self) -> int:
        """Return a number that was not returned before."""
        self._count += 1
        return self._count

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that were killed."""


def _handler(server: S3Server) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        store = server

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: S3Server

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.store.lock:
            self.store.log.append(f"{self.command} {name}")
            if self.store.refusals:
                self.store.refusals -= 1
                answer = _error(503, "SlowDown")
            elif self.command in ("PUT", "POST", "DELETE") and self.store.is_read_only:
                answer = _error(403, "AccessDenied")
            else:
                answer = self._answer(name, query, body)
            is_write = self.command in ("PUT", "POST")
            is_lost = is_write and self.store.lose_replies > 0
            self.store.lose_replies -= is_lost
            if is_write and self.store.lose_nth_reply is not None:
                is_lost = self.store.lose_nth_reply == 0
                self.store.lose_nth_reply = None if is_lost else self.store.lose_nth_reply - 1
        if self.store.before_answer is not None:
            self.store.before_answer()
        if is_lost:
            self.close_connection = True
            return
        status, headers, data = answer
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", headers.get("X-Length") or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, name: str, query: Query, body: bytes) -> tuple[int, dict[str, str], bytes]:
        bucket, _, key = name.partition("/")
        if bucket not in self.store.buckets:
            return _error(404, "NoSuchBucket")
        if not key:
            return self._uploads(bucket, query) if "uploads" in query else self._list(bucket, query)
        if "uploads" in query:
            return self._begin(name)
        if "uploadId" in query:
            return self._part(name, query, body)
        if self.command == "PUT":
            return self._put(name, body)
        if self.command == "DELETE":
            self.store.objects.pop(name, None)
            return 204, {}, b""
        return self._get(name)

    def _get(self, name: str) -> tuple[int, dict[str, str], bytes]:
        found = self.store.objects.get(name)
        if found is None:
            return _error(404, "NoSuchKey")
        if self.headers.get("If-Match") not in (None, found.etag):
            return _error(412, "PreconditionFailed")
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.when, usegmt=True)}
        headers |= {f"x-amz-meta-{key}": value for key, value in found.meta.items()}
        data, size = found.data, len(found.data)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            first, last = wanted.groups()
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= size:
                return _error(416, "InvalidRange")
            data = data[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            return 206, headers, data
        if self.command == "HEAD":
            headers["X-Length"] = str(size)
        return 200, headers, data

    def _fault(self, name: str) -> tuple[int, dict[str, str], bytes] | None:
        """Judge the conditions of a write."""
        found = self.store.objects.get(name)
        if self.headers.get("If-None-Match") == "*" and found is not None:
            return _error(412, "PreconditionFailed")
        match = self.headers.get("If-Match")
        if match is not None and found is None:
            return _error(404, "NoSuchKey")
        if match is not None and found is not None and found.etag != match:
            return _error(412, "PreconditionFailed")
        return None

    def _meta(self) -> dict[str, str]:
        prefix = "x-amz-meta-"
        items = ((key.lower(), value) for key, value in self.headers.items())
        return {key.removeprefix(prefix): value for key, value in items if key.startswith(prefix)}

    def _put(self, name: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        fault = self._fault(name)
        if fault:
            return fault
        source = self.headers.get("x-amz-copy-source")
        if source:
            found = self.store.objects.get(urllib.parse.unquote(source).lstrip("/"))
            if found is None:
                return _error(404, "NoSuchKey")
            self.store.objects[name] = found
            return _xml("CopyObjectResult", f"<ETag>{found.etag}</ETag>")
        self.store.objects[name] = _stored(body, self._meta())
        return 200, {"ETag": self.store.objects[name].etag}, b""

    def _begin(self, name: str) -> tuple[int, dict[str, str], bytes]:
        upload = f"upload-{self.store.number()}"
        self.store.uploads[upload] = Upload(name, self._meta(), time.time())
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")

    def _part(self, name: str, query: Query, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upload = self.store.uploads.get(query["uploadId"])
        if upload is None or upload.key != name:
            return _error(404, "NoSuchUpload")
        if self.command == "PUT" and self.store.refuse_parts:
            return _error(400, "InvalidPart")
        if self.command == "PUT":
            self.store.abort_after_parts -= 1
            if self.store.abort_after_parts == 0:
                del self.store.uploads[query["uploadId"]]
            part = upload.parts[int(query["partNumber"])] = _stored(body, {})
            return 200, {"ETag": part.etag}, b""
        if self.command == "DELETE":
            del self.store.uploads[query["uploadId"]]
            return 204, {}, b""
        fault = self._fault(name)
        if fault:
            return fault
        data = b"".join(upload.parts[number].data for number in sorted(upload.parts))
        del self.store.uploads[query["uploadId"]]
        self.store.objects[name] = stored = _stored(data, upload.meta)
        return _xml("CompleteMultipartUploadResult", f"<ETag>{stored.etag}</ETag>")

    def _uploads(self, bucket: str, query: Query) -> tuple[int, dict[str, str], bytes]:
        prefix = f"{bucket}/{query.get('prefix', '')}"
        found = "".join(
            f"<Upload><Key>{escape(one.key.partition('/')[2])}</Key><UploadId>{number}</UploadId>"
            f"<Initiated>{_iso(one.when)}</Initiated></Upload>"
            for number, one in self.store.uploads.items()
            if one.key.startswith(prefix)
        )
        return _xml("ListMultipartUploadsResult", found)

    def _list(self, bucket: str, query: Query) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", "")
        limit = min(self.store.page, int(query.get("max-keys") or 1000))
        entries: dict[str, Stored | None] = {}
        for name, stored in sorted(self.store.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if not name.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            entry, kept = (prefix + head + cut, None) if cut else (key, stored)
            if entry > after:
                entries[entry] = kept
        shown = list(entries.items())[:limit]
        text = "".join(_entry(key, kept) for key, kept in shown)
        is_more = len(entries) > len(shown)
        text += f"<IsTruncated>{str(is_more).lower()}</IsTruncated>"
        if is_more:
            text += f"<NextContinuationToken>{escape(shown[-1][0])}</NextContinuationToken>"
        return _xml("ListBucketResult", text)


def _entry(key: str, stored: Stored | None) -> str:
    quoted = escape(urllib.parse.quote(key))
    if stored is None:
        return f"<CommonPrefixes><Prefix>{quoted}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{quoted}</Key><Size>{len(stored.data)}</Size>"
        f"<ETag>{escape(stored.etag)}</ETag><LastModified>{_iso(stored.when)}</LastModified>"
        "</Contents>"
    )


def _stored(data: bytes, meta: dict[str, str]) -> Stored:
    return Stored(data, meta, f'"{hashlib.md5(data).hexdigest()}"', time.time())


def _iso(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _xml(tag: str, text: str) -> tuple[int, dict[str, str], bytes]:
    body = f'<?xml version="1.0"?><{tag}>{text}<EncodingType>url</EncodingType></{tag}>'
    return 200, {"Content-Type": "application/xml"}, body.encode()


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    return status, {"Content-Type": "application/xml"}, text.encode()
