"""One shard to samples, in order, streaming; and whether the shard ended whole.

`read_shard` is the seam: a tar is read here, a Parquet file by
`pipeline.input.table`, a part of a folder of pictures by `pipeline.input.pictures`.
webdataset's own iteration is not used here: it loses images of keys with dots, of duplicate
keys and behind links, and takes a cut tar for a short one. `pipeline.input.archive` walks the
blocks instead. What makes a sample:

- Every member with an image extension, whatever its case, is one sample; so is a member with no
  extension whose first bytes are a picture's. Its index is its place among these.
- An image's key is its name without the *last* extension: `a.b.jpg` has the key `a.b`.
- A field is any other member `KEY.NAME`; NAME (in lower case) is all that follows the key and a
  dot: `txt`, `meta.json`. Fields stand next to their image, before or after it.
- Several images of one key in a row (`a.jpg a.png`) share its fields. A member name that comes
  again begins a new sample, so a key that was packed twice is two samples, each with its own.
- Dot files, `__MACOSX`, folders and devices are junk: skipped, and counted by reason.
- A link is a row with the error `link`: its bytes are elsewhere, and may be nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Set
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from pipeline.errors import SampleError, ShardError
from pipeline.images.formats import IMAGE_EXTENSIONS, SNIFF_BYTES, extension_of, sniff
from pipeline.input.archive import Archive, Member, decompressed
from pipeline.input.counted import CountedFile
from pipeline.input.grouping import Group, Image
from pipeline.input.read_ahead import ReadAhead
from pipeline.input.shards import is_table, open_shard
from pipeline.records import Sample, SampleRef, Shard


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """What is kept of a shard. `fields` None keeps all; else only members named `KEY.FIELD`."""

    fields: frozenset[str] | None = None
    max_member_bytes: int = 512 << 20
    max_field_bytes: int = 16 << 20
    has_lenient_end: bool = False  # forgive a missing end marker, and a long tail of zeros


@dataclass(slots=True)
class ShardStats:
    """What has been seen of a shard so far; the numbers only grow, any thread may look."""

    bytes_read: int = 0  # of the file as it lies there, compressed or not
    bytes_skipped: int = 0  # of it, those of unwanted members that were sought past
    num_images: int = 0  # image members: the rows that the shard will have
    num_samples: int = 0  # of these, the ones handed on
    num_skipped: int = 0  # of these, the ones that `skip` named
    num_withheld: int = 0  # of these, the ones at a damage whose fields may be lost
    junk: Counter[str] = field(default_factory=Counter)  # reason -> members

    @property
    def bytes_passed(self) -> int:
        """How far into the file the reader is."""
        return self.bytes_read + self.bytes_skipped

    def note_place(self, place: int) -> None:
        """Count what was left unread before a place in the file."""
        self.bytes_skipped = max(self.bytes_skipped, place - self.bytes_read)

    def note_jump(self, num_bytes: int) -> None:
        """Count bytes that were sought past."""
        self.bytes_skipped += num_bytes


def read_shard(
    shard: Shard,
    settings: ReaderSettings | None = None,
    *,
    skip: Container[int] = (),
    stats: ShardStats | None = None,
    open_tar: Callable[[Shard], BinaryIO] | None = None,
) -> Iterator[Sample]:
    """Return a shard's samples in order, all but those whose index is in `skip`.

    Raises ShardError, after every sample that came whole before it, if the shard is damaged or
    cannot be read. At a damage, an image whose fields may lie behind it is withheld, so that no
    row is ever made from half a sample. Memory holds one sample at a time, never the tar.
    """
    settings = settings or ReaderSettings()
    stats = stats if stats is not None else ShardStats()
    if shard.pictures is not None:
        from pipeline.input.pictures import read_pictures

        return read_pictures(shard, settings, skip, stats)
    if is_table(shard):
        from pipeline.input.table import read_table

        return read_table(shard, settings, skip, stats)
    return _read_tar(shard, settings, skip, stats, open_tar or open_shard)


def _read_tar(
    shard: Shard,
    settings: ReaderSettings,
    skip: Container[int],
    stats: ShardStats,
    open_tar: Callable[[Shard], BinaryIO],
) -> Iterator[Sample]:
    with open_tar(shard) as file:
        raw = ReadAhead(cast(BinaryIO, CountedFile(file, stats)), stats.note_jump)
        archive = Archive(
            decompressed(raw, shard.url), shard.url, has_lenient_end=settings.has_lenient_end
        )
        reader = _Reader(shard.id, archive, settings, skip, stats)
        yield from reader.samples()


class _Reader:
    """The state of one pass over one shard."""

    def __init__(
        self,
        shard_id: str,
        archive: Archive,
        settings: ReaderSettings,
        skip: Container[int],
        stats: ShardStats,
    ) -> None:
        self._shard_id = shard_id
        self._archive = archive
        self._settings = settings
        self._skip = skip
        self._stats = stats
        self._group = Group(stats.junk)
        self._current: Member | None = None
        self._usual_fields: Set[str] | None = None  # what the sample before had

    def samples(self) -> Iterator[Sample]:
        """Yield what groups give, and at a damage what was whole before it."""
        try:
            for member in self._archive:
                self._current = member
                yield from self._hand_on(self._add(member))
                self._current = None
        except ShardError:
            yield from self._hand_on(self._whole_at_damage())
            raise
        yield from self._hand_on(self._group.finish())

    def _add(self, member: Member) -> list[Image]:
        """Put a member into the group; return the images that it shows to be complete."""
        reason = _junk_reason(member)
        if reason:
            self._stats.junk[reason] += 1
            return []
        extension = extension_of(member.name)
        if extension in IMAGE_EXTENSIONS:
            return self._add_image(member, b"")
        if extension:
            return self._add_field(member)
        head = self._archive.read(SNIFF_BYTES) if member.kind == "file" else b""
        if sniff(head):
            return self._add_image(member, head)
        self._stats.junk["no extension"] += 1
        return []

    def _add_image(self, member: Member, head: bytes) -> list[Image]:
        index = self._stats.num_images
        key = member.name.rpartition(".")[0] if not head else member.name
        fault = self._fault_of(member)
        is_wanted = index not in self._skip
        data = b""
        # Counted and read first: if the data is cut, what stands in the group is still whole.
        if is_wanted and fault is None:
            try:
                data = self._archive.read(member.size, head)
            except MemoryError:
                fault = SampleError("too_large", f"no memory for its {member.size} bytes")
        self._stats.num_images += 1
        image = Image(index, _plain(key), member.name, data, fault, is_wanted)
        return self._group.add_image(image)

    def _add_field(self, member: Member) -> list[Image]:
        if member.kind != "file" or member.size > self._settings.max_field_bytes:
            what = member.kind if member.kind != "file" else "over the size limit"
            self._stats.junk[f"field: {what}"] += 1
            return []
        names = self._settings.fields
        name = _plain(member.name)
        is_wanted = names is None or name.lower().endswith(tuple(f".{one}" for one in names))
        return self._group.add_field(name, self._archive.read(member.size) if is_wanted else None)

    def _fault_of(self, member: Member) -> SampleError | None:
        if member.kind == "link":
            return SampleError(
                "link", f"a link to {member.target!r}; pack the picture itself (tar -h)"
            )
        if member.kind == "sparse":
            return SampleError("unsupported", "a sparse tar member; pack it without --sparse")
        if member.size > self._settings.max_member_bytes:
            limit = self._settings.max_member_bytes
            return SampleError("too_large", f"{member.size} bytes, the limit is {limit}")
        return None

    def _whole_at_damage(self) -> list[Image]:
        """Return the open group's images, unless fields of theirs may lie behind the damage."""
        struck = _plain(self._current.name) if self._current else None
        has_ended = self._group.has_ended_before(struck)
        images = self._group.finish()
        wanted: Set[str] | None = self._settings.fields
        if wanted is not None:
            is_whole = all(wanted <= image.fields.keys() for image in images)
        else:  # all are asked for: go by the sample before
            usual = self._usual_fields
            is_whole = struck is None and all(
                bool(image.fields) if usual is None else usual <= image.fields.keys()
                for image in images
            )
        if has_ended or is_whole:
            return images
        self._stats.num_withheld += len(images)
        return []

    def _hand_on(self, images: list[Image]) -> Iterator[Sample]:
        for image in images:
            self._usual_fields = image.fields.keys()
            if not image.is_wanted:
                self._stats.num_skipped += 1
                continue
            ref = SampleRef(self._shard_id, image.index, image.key, image.member)
            self._stats.num_samples += 1
            yield Sample(ref, image.data, image.fields, image.fault)


def _junk_reason(member: Member) -> str:
    """Say why a member is nobody's data, or ``""``."""
    if member.kind in ("folder", "special"):
        return member.kind
    parts = [part for part in member.name.split("/") if part not in ("", ".", "..")]
    if not parts:
        return "no name"
    if "__MACOSX" in parts:
        return "__MACOSX"
    return "dot file" if any(part.startswith(".") for part in parts) else ""


def _plain(name: str) -> str:
    """Drop the `./` that `tar -C folder .` puts before every name."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name
