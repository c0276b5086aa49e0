"""What a url shows, what it names, and what it must keep to itself.

    full    https://me:pw@host/a/1.tar?part=2&X-Amz-Signature=5f..   what is asked for
    shown   https://host/a/1.tar                                     in logs, rows, messages
    name    https://host/a/1.tar?part=2                              what the shard's id is made of

A signature is new each day for the same object, so it is no part of the name; any other parameter
may choose the object, so it is. Only `shown` is ever written down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

SCHEMES = ("s3", "http", "https", "gs", "gcs", "hf")
WEB_SCHEMES = ("http", "https")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SIGNED = re.compile(  # of S3 in both versions, Google, CloudFront, and bearer words of many
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|(access_?|auth_?)?token|api_?key|password|secret"
)
_SHARED_ACCESS = frozenset(  # Azure's, which are short and common words but for `sig` beside them
    "sv ss srt sp st se spr sr sip si sig skoid sktid skt ske sks skv".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Address:
    """A url in its three forms; its repr shows but the harmless ones."""

    full: str = field(repr=False)
    shown: str
    name: str = field(repr=False)  # may hold parameters that nobody knows to be harmless

    @classmethod
    def of(cls, url: str) -> Address:
        """Take a url apart. In stores but the web, a key is a key: `?` and `#` are part of it."""
        if scheme_of(url) not in WEB_SCHEMES:
            return cls(url, url, url)
        parts = urlsplit(url)
        place = (parts.scheme.lower(), _without_user(parts.netloc).lower(), parts.path or "/")
        return cls(
            url, urlunsplit((*place, "", "")), urlunsplit((*place, _unsigned(parts.query), ""))
        )

    @property
    def has_more_than_it_shows(self) -> bool:
        """Whether what is asked for must be kept beside what is shown."""
        return self.full != self.shown


def scheme_of(url: str) -> str:
    """Return a url's scheme in lower case, or ``""`` for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def is_remote(url: str) -> bool:
    """Whether a url or pattern is in a store that is read here."""
    return scheme_of(url) in SCHEMES


def shown(url: str) -> str:
    """Return a url, or a pattern of urls, as it may be written down."""
    if scheme_of(url) in WEB_SCHEMES:
        head, scheme, rest = url.partition("://")
        place, slash, path = rest.partition("/")
        return head + scheme + _without_user(place).partition("?")[0] + slash + _bare(path)
    return re.sub(r"(://)[^/@]*:[^/@]*@", r"\1", url)  # s3://key:secret@bucket, which is refused


def _bare(path: str) -> str:
    return path.partition("?")[0].partition("#")[0]


def _without_user(netloc: str) -> str:
    return netloc.rpartition("@")[2]


def _unsigned(query: str) -> str:
    """Return the parameters that are no part of a signature, in their order."""
    found = parse_qsl(query, keep_blank_values=True)
    names = {name.lower() for name, _ in found}
    dropped = _SHARED_ACCESS if "sig" in names else frozenset()
    return urlencode(
        [
            (name, value)
            for name, value in found
            if not _SIGNED.fullmatch(name.lower()) and name.lower() not in dropped
        ]
    )
