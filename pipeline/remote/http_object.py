"""An object behind HTTP: ranges and conditions where the server knows them, checks where not.

A server that ignores ranges is read from the start again, up to where the last connection broke. A
redirect is followed anew each time, so that a signature in its target is always a fresh one.
"""

from __future__ import annotations

import os
import re
import threading
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import IncompleteRead, responses
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from pipeline.errors import RequestError
from pipeline.remote.addresses import Address
from pipeline.remote.faults import RemoteError, fault_of_status
from pipeline.remote.objects import Version
from pipeline.remote.patience import Patience

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 64  # to one host
CHUNK = 1 << 16

_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_REDIRECTS = (301, 302, 303, 307, 308)

_pools: dict[tuple[str, int], Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class HttpObject:
    """What a GET of one url brings."""

    url: str
    full: str = field(repr=False)
    patience: Patience

    @classmethod
    def at(cls, url: str, patience: Patience) -> HttpObject:
        """Return the object; RequestError where urllib3 is missing or the url names no host."""
        _urllib3()
        address = Address.of(url)
        if not urlsplit(url).hostname:
            raise RequestError(f"{address.shown!r} names no host")
        return cls(address.shown, url, patience)

    def look(self) -> Version:
        """Ask for the first byte: unlike HEAD, that is allowed wherever GET is."""
        answer = self._ask({"Range": "bytes=0-0"})
        try:
            self._check_status(answer, (200, 206, 416))
            if answer.status == 416:
                if _total(answer) != 0:
                    raise fault_of_status(416, _status_text(416))
                return _version(answer, 0)
            first = _first(answer, 1)
            _refuse_page(answer, first)
            version = _version(answer, _total(answer) if answer.status == 206 else _length(answer))
            if version.size is None and not answer.chunked:
                raise RemoteError(
                    "refused", "the server does not tell its length; wanted a Content-Length"
                )
            return version
        finally:
            _let_go(answer)

    def open(self, offset: int, end: int | None, version: Version) -> HttpBody:
        """Begin to fetch; see `RemoteObject.open`."""
        headers = {}
        if offset or end is not None:
            headers["Range"] = f"bytes={offset}-{'' if end is None else end - 1}"
            if version.etag and not version.etag.startswith("W/"):
                headers["If-Range"] = version.etag
        if offset and version.size is None and not (version.etag or version.modified):
            raise RemoteError("refused", "it broke, and a server that tells no version resumes not")
        answer = self._ask(headers)
        try:
            self._check_status(answer, (200, 206))
            first = _first(answer, CHUNK)
            if not offset:
                _refuse_page(answer, first)
            is_part = answer.status == 206
            found = _version(answer, _total(answer) if is_part else _length(answer))
            if version.is_other(found):
                raise RemoteError("changed", "another version came")
            if is_part and _start(answer) != offset:
                raise RemoteError("refused", f"bytes from {_start(answer)} came, wanted {offset}")
            return HttpBody(answer, first, 0 if is_part else offset)
        except BaseException:
            answer.close()
            raise

    def _ask(self, headers: dict[str, str]) -> Any:
        """Return the answer at the end of all redirects, its body not read yet."""
        urllib3 = _urllib3()
        url = self.full
        timeout = urllib3.Timeout(
            connect=self.patience.connect_seconds, read=self.patience.stall_seconds
        )
        for _ in range(MAX_REDIRECTS + 1):
            try:
                answer = _pool(url).urlopen(
                    "GET",
                    _without_user(url),
                    headers={"Accept-Encoding": "identity", **headers, **_login(url)},
                    timeout=timeout,
                    redirect=False,
                    retries=False,
                    preload_content=False,
                    decode_content=False,
                )
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise _fault_of(error) from None
            target = answer.headers.get("Location") if answer.status in _REDIRECTS else None
            if target is None:
                return answer
            answer.close()
            url = _redirected(url, target)
        raise RemoteError("refused", f"more than {MAX_REDIRECTS} redirects")

    def _check_status(self, answer: Any, good: tuple[int, ...]) -> None:
        status = int(answer.status)
        if status in good:
            return
        text = _status_text(status)
        if status == 412:
            raise RemoteError("changed", text)
        code = re.search(rb"<Code>([A-Za-z]{1,60})</Code>", _read(answer, 2000))
        if code:  # S3 and Google say it in XML
            text = f"{text} {code[1].decode()}"
        if status in (401, 403) and urlsplit(self.full).query:
            text += " (has the signed url expired?)"
        wait = str(answer.headers.get("Retry-After", ""))
        raise fault_of_status(status, text, wait_seconds=float(wait) if wait.isdigit() else None)


class HttpBody:
    """The body of one answer, less what was had before."""

    def __init__(self, answer: Any, first: bytes, skip: int) -> None:
        """Give `first` and what comes behind it, but for the first `skip` bytes of all."""
        self._answer = answer
        self._first = first
        self._skip = skip

    def read(self, max_bytes: int) -> bytes:
        """Return what has come, as soon as anything has."""
        while self._skip:
            passed = self._next(min(self._skip, CHUNK))
            if not passed:
                raise RemoteError("transient", "the connection ended early")
            self._skip -= len(passed)
        return self._next(max_bytes)

    def _next(self, max_bytes: int) -> bytes:
        if self._first:
            data, self._first = self._first[:max_bytes], self._first[max_bytes:]
            return data
        return _read(self._answer, max_bytes)

    def close(self) -> None:
        """Close the connection too, unless all of the body was read."""
        _let_go(self._answer)


def _let_go(answer: Any) -> None:
    """Keep the connection for the next request if all of the answer was read, else close it."""
    with suppress(Exception):  # nobody wants the rest
        if answer.length_remaining == 0:
            answer.release_conn()
        else:
            answer.close()


def _first(answer: Any, max_bytes: int) -> bytes:
    """Return the first bytes of a body, which prove that the headers before them came whole.

    Where a connection ends inside its headers, http.client takes those that came for all, and
    half an etag for an etag.
    """
    first = _read(answer, max_bytes)
    if not first and not answer.chunked and _length(answer) != 0:
        raise RemoteError("transient", "the answer broke off")
    return first


def _read(answer: Any, max_bytes: int) -> bytes:
    urllib3 = _urllib3()
    try:
        return bytes(answer.read1(max_bytes) or b"")
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _fault_of(error) from None


def _fault_of(error: Exception) -> RemoteError:
    """Return a transient fault, or for what no time will mend a refusal; never with an address."""
    errors = _urllib3().exceptions
    if isinstance(error, errors.ReadTimeoutError):
        return RemoteError("transient", "the server stalled")
    if isinstance(error, errors.NameResolutionError):
        return RemoteError("transient", "the host's name is not known")
    if isinstance(error, errors.NewConnectionError):  # before the time-out, which is its parent
        return RemoteError("transient", "the server cannot be reached")
    if isinstance(error, errors.ConnectTimeoutError):
        return RemoteError("transient", "connecting timed out")
    if isinstance(error, errors.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return RemoteError("refused", "the server's certificate is not trusted")
    if isinstance(error, errors.LocationValueError):
        return RemoteError("refused", "not an address that can be asked")
    inner = error.args[-1] if error.args else None
    if isinstance(inner, IncompleteRead):
        return RemoteError("transient", "the connection ended early")
    what = type(inner if isinstance(inner, Exception) else error).__name__
    return RemoteError("transient", f"the connection broke ({what})")


def _refuse_page(answer: Any, first: bytes) -> None:
    kind = str(answer.headers.get("Content-Type", "")).lower()
    if kind.startswith(("text/html", "application/xhtml")) and first[:1] in (
        b"<",
        b"\n",
        b"\r",
        b" ",
    ):
        raise RemoteError("refused", "a web page came, not a shard: a login or an error?")


def _version(answer: Any, size: int | None) -> Version:
    headers = answer.headers
    return Version(size, headers.get("ETag", ""), headers.get("Last-Modified", ""))


def _length(answer: Any) -> int | None:
    told = str(answer.headers.get("Content-Length", ""))
    return int(told) if told.isdigit() and not answer.chunked else None


def _total(answer: Any) -> int | None:
    match = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
    return int(match[3]) if match and match[3] != "*" else None


def _start(answer: Any) -> int | None:
    match = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
    return int(match[1]) if match and match[1] else None


def _status_text(status: int) -> str:
    return f"{status} {responses.get(status, '')}".strip()


def _redirected(url: str, target: str) -> str:
    found = urljoin(url, target)
    before, after = urlsplit(url), urlsplit(found)
    if after.scheme not in ("http", "https") or not after.hostname:
        raise RemoteError("refused", f"a redirect to {after.scheme or 'nowhere'}://")
    if (before.scheme, after.scheme) == ("https", "http"):
        raise RemoteError("refused", "a redirect from https to http")
    return found


def _login(url: str) -> dict[str, str]:
    """Return the header for the `user:password@` of a url."""
    parts = urlsplit(url)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _pool(url: str) -> Any:
    """Return the connections to use: those through a proxy where the environment names one."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme, "") if parts.hostname else ""
    if proxy and proxy_bypass(parts.hostname or ""):
        proxy = ""
    key = (proxy, os.getpid())  # none goes over a fork
    with _lock:
        if key not in _pools:
            urllib3 = _urllib3()
            options = {"num_pools": 16, "maxsize": MAX_CONNECTIONS, "block": False}
            _pools[key] = (
                urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
            )
        return _pools[key]


def _urllib3() -> Any:
    try:
        import urllib3
    except ImportError:
        raise RequestError("http:// needs urllib3; pip install 'captionjob[http]'") from None
    return urllib3
