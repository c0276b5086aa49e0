"""What a url with braces, stars or a slash at its end stands for, and how large each object is.

Single objects are asked for on a few threads. Where many keys of one bucket are named, a listing
tells a thousand of them at a time. HTTP has no listing.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import JobError, RequestError, ShardError
from pipeline.remote.addresses import WEB_SCHEMES, Address, scheme_of, shown
from pipeline.remote.faults import RemoteError
from pipeline.remote.objects import Version, object_at
from pipeline.remote.patience import Patience
from pipeline.remote.reader import Attempts

THREADS = 32
MAX_ASKED = 10_000  # web addresses; beyond that a shard's size is learnt when its turn comes
MIN_LISTED = 50  # keys for which one listing is better than asking for each


IsWanted = Callable[[str], bool]  # of a name in a folder


@dataclass(frozen=True, slots=True)
class Listed:
    """An object that is there; `version` None if it was not asked for."""

    address: Address
    version: Version | None


class Listing(Protocol):
    """A store that can be asked what it holds. Raises RemoteError, or ShardError at last."""

    def folder(self, url: str, is_wanted: IsWanted) -> list[Listed]:
        """Return the wanted objects of a folder itself, not those of folders below."""

    def matching(self, url: str) -> list[Listed]:
        """Return the objects that a pattern's stars match, as a shell would match files."""

    def among(self, urls: Sequence[str]) -> dict[str, Version] | None:
        """Return which of many named objects there are; None where asking each is better."""


def list_objects(pattern: str, urls: Sequence[str], kinds: Sequence[IsWanted]) -> list[Listed]:
    """Return the objects that `urls`, which came of a pattern's braces, stand for, in order.

    Of a folder (`s3://bucket/folder/`) they are those whose names are of the first of `kinds` that
    is there. Raises RequestError where something is missing or not allowed, and JobError where the
    store does not answer.
    """
    try:
        return _list(pattern, urls, kinds)
    except RemoteError as error:
        raise _refusal(shown(pattern), error) from None
    except ShardError as error:
        raise JobError(f"--shards {shown(pattern)!r}: {error}") from None


def _list(pattern: str, urls: Sequence[str], kinds: Sequence[IsWanted]) -> list[Listed]:
    scheme = scheme_of(pattern)
    if scheme in WEB_SCHEMES:
        _refuse_stars(pattern, urls)
        return _ask_each(pattern, urls)
    listing = _listing(urls[0])
    found: list[Listed] = []
    single: list[str] = []
    for url in urls:
        if not (glob.has_magic(url) or _is_folder(url)):
            single.append(url)
            continue
        found += _single(pattern, single, listing.among)
        single = []
        is_glob = glob.has_magic(url)
        new = listing.matching(url) if is_glob else _folder(listing, url, kinds)
        if not new:
            what = "matches no object" if is_glob else "holds no tar and no Parquet file"
            raise RequestError(f"--shards {shown(pattern)!r} {what}")
        found += new
    return found + _single(pattern, single, listing.among)


def _folder(listing: Listing, url: str, kinds: Sequence[IsWanted]) -> list[Listed]:
    return next((found for kind in kinds if (found := listing.folder(url, kind))), [])


def _listing(url: str) -> Listing:
    if scheme_of(url) == "s3":
        from pipeline.remote.s3_listing import S3Listing

        return S3Listing(url)
    from pipeline.remote.filesystem_listing import FilesystemListing

    return FilesystemListing(url)


def _single(
    pattern: str,
    urls: Sequence[str],
    among: Callable[[Sequence[str]], dict[str, Version] | None],
) -> list[Listed]:
    """Return objects named one by one, by a listing if there are many of them."""
    known = among(urls) if len(urls) >= MIN_LISTED else None
    if known is None:
        return _ask_each(pattern, urls)
    missing = [url for url in urls if url not in known]
    if missing:
        raise _missing(pattern, missing, len(urls))
    return [Listed(Address.of(url), known[url]) for url in urls]


def _ask_each(pattern: str, urls: Sequence[str]) -> list[Listed]:
    """Ask for each object, on some threads; beyond a number of them, for none."""
    addresses = [Address.of(url) for url in urls]
    patience = Patience.from_environment()
    remotes = [object_at(url, patience) for url in urls[:MAX_ASKED]]
    if len(urls) > MAX_ASKED:
        return [Listed(address, None) for address in addresses]
    missing: list[str] = []

    def ask(place: int) -> Version | None:
        remote = remotes[place]
        attempts = Attempts(remote.url, patience)
        while True:
            try:
                return remote.look()
            except RemoteError as error:
                if error.kind == "missing":
                    missing.append(remote.url)
                    return None
                if error.kind != "transient":
                    raise _refusal(remote.url, error) from None
                attempts.failed(error, "")

    pool = ThreadPoolExecutor(THREADS)
    try:
        versions = list(pool.map(ask, range(len(remotes))))
    finally:
        pool.shutdown(cancel_futures=True)  # one refusal is enough, ten thousand take hours
    if missing:
        raise _missing(pattern, sorted(missing), len(urls))
    return [Listed(one, version) for one, version in zip(addresses, versions, strict=True)]


def _refusal(what: str, error: RemoteError) -> RequestError:
    return RequestError(f"--shards {what!r}: {error.what}")


def _missing(pattern: str, missing: Iterable[str], wanted: int) -> RequestError:
    names = [shown(url) for url in missing]
    if wanted == 1:
        return RequestError(f"--shards {shown(pattern)!r} does not exist")
    first = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return RequestError(
        f"--shards {shown(pattern)!r}: {len(names)} of {wanted} objects are missing: {first}"
    )


def _refuse_stars(pattern: str, urls: Sequence[str]) -> None:
    for url in urls:
        bare = shown(url)
        if "*" in bare or _is_folder(bare):
            raise RequestError(
                f"--shards {shown(pattern)!r}: HTTP has no listing; "
                "wanted names, or braces such as {00000..00099}.tar"
            )


def _is_folder(url: str) -> bool:
    rest = url.partition("://")[2]
    return rest.endswith("/") or not os.path.dirname(rest)
