"""Is a shard still the file that its committed rows were made from?"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass

from pipeline.errors import ShardError
from pipeline.input.pictures import digest_of_pictures, stamp_of_pictures
from pipeline.input.shards import local_path, open_shard
from pipeline.records import Shard
from pipeline.remote.addresses import is_remote
from pipeline.remote.objects import object_at
from pipeline.remote.patience import Patience
from pipeline.remote.reader import Note, fetch, version_of

SAMPLE_BYTES = 1 << 16  # hashed at the head and at the tail: reading a whole shard twice is dear


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """A shard's size, time of change in nanoseconds, and the hash of its head and tail.

    A remote object's etag, made a number, stands in for the time of change.
    """

    url: str
    size: int
    mtime_ns: int
    sha256: str

    def to_json(self) -> str:
        """Return the text that lies in each piece's metadata."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ShardIdentity:
        """Read what `to_json` wrote; ValueError, KeyError or TypeError for anything else."""
        found = json.loads(text)
        return cls(
            str(found["url"]), int(found["size"]), int(found["mtime_ns"]), str(found["sha256"])
        )

    def has_same_bytes(self, other: ShardIdentity) -> bool:
        """True if size and hash are equal, whatever the time of change."""
        return self.size == other.size and self.sha256 == other.sha256


def stamp_of(shard: Shard) -> tuple[int, int]:
    """Return a shard's size and time of change, without opening it; of a command, zeros."""
    if shard.command is not None:
        return 0, 0
    if is_remote(shard.url):
        patience = Patience.from_environment()
        return version_of(object_at(shard.address or shard.url, patience), patience).stamp
    if shard.pictures is not None:
        return stamp_of_pictures(shard)
    try:
        status = os.stat(local_path(shard.url))
    except OSError as error:
        raise ShardError(shard.url, f"cannot be opened: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns


def identify(shard: Shard, note: Note | None = None) -> ShardIdentity:
    """Return the identity of the file that lies there now; ShardError if none does.

    `note` is told of each failure of a connection that is made anew. A command is known by its
    words alone: that it writes the same bytes again is on the user.
    """
    if shard.command is not None:
        return ShardIdentity(shard.url, 0, 0, hashlib.sha256(shard.url.encode()).hexdigest())
    if is_remote(shard.url):
        return _identify_remote(shard, note)
    size, mtime_ns = stamp_of(shard)
    if shard.pictures is not None:
        return ShardIdentity(shard.url, size, mtime_ns, digest_of_pictures(shard))
    digest = hashlib.sha256()
    try:
        with open_shard(shard) as file:
            digest.update(file.read(SAMPLE_BYTES) or b"")
            if size > SAMPLE_BYTES:
                file.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES) or b"")
    except OSError as error:
        raise ShardError(shard.url, f"reading failed: {error.strerror or error}") from error
    return ShardIdentity(shard.url, size, mtime_ns, digest.hexdigest())


def _identify_remote(shard: Shard, note: Note | None) -> ShardIdentity:
    """Return the identity of one version of an object: its head and tail are of the same one."""
    patience = Patience.from_environment()
    remote = object_at(shard.address or shard.url, patience)
    version = version_of(remote, patience, note)
    size, number = version.stamp
    digest = hashlib.sha256(fetch(remote, version, 0, SAMPLE_BYTES, patience, note))
    if size > SAMPLE_BYTES:
        begin = max(SAMPLE_BYTES, size - SAMPLE_BYTES)
        digest.update(fetch(remote, version, begin, size, patience, note))
    return ShardIdentity(shard.url, size, number, digest.hexdigest())
