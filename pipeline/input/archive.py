"""A strict, streaming tar reader: it knows whether the archive ended whole.

`tarfile` and webdataset's iteration both end quietly at a cut, at a hole of zeros and at a
corrupt header: fewer samples, no error. So the blocks are walked here, and only the parsing of
one header is left to `tarfile.TarInfo.frombuf`. An archive is whole if

    headers and data ... | zero block(s): the end | zeros up to the end of the file

with every block complete, and each header's checksum right. All else is a ShardError. What a
tar cannot tell is a changed byte in a member's data, since it has no checksum of data.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

from pipeline.errors import ShardError
from pipeline.input.read_ahead import ReadAhead

BLOCK = 512
CHUNK = 1 << 20
MAX_HEADER_BYTES = 1 << 20  # of one PAX header or GNU long name: nobody's path is longer
# Two zero blocks, then zeros up to a multiple of 20 blocks, is what all usual writers end with.
MAX_TAIL_BYTES = 1024 + 10240 - 512


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a tar, its data still in the stream."""

    name: str
    size: int
    kind: str  # file | folder | link | sparse | special
    target: str = ""  # of a link


class Archive:
    """Walk the members of an open, decompressed tar stream, once, front to back.

        for member in archive:
            data = archive.read(limit)     # or not: what is left is skipped

    Iteration raises ShardError where the archive proves damaged, after every member before.
    """

    def __init__(self, stream: IO[bytes], url: str, *, has_lenient_end: bool = False) -> None:
        """Read from `stream`; `has_lenient_end` forgives a missing end marker and a long tail."""
        self._stream = stream
        self._url = url
        self._has_lenient_end = has_lenient_end
        self._offset = 0
        self._data_left = 0  # of the current member
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        while (member := self._next_member()) is not None:
            yield member
            self._skip_data()
        self._check_tail()

    def read(self, max_bytes: int, head: bytes = b"") -> bytes:
        """Return `head` and up to `max_bytes` of the current member's data not read yet.

        MemoryError where there is no room for it; iteration goes on behind the member even so.
        """
        if not head and min(max_bytes, self._data_left) <= CHUNK:
            return self._read_data(max_bytes)
        buffer = io.BytesIO(head)  # gives its bytes away without a copy, unlike a joined list
        buffer.seek(len(head))
        end = len(head) + max_bytes
        while chunk := self._read_data(min(CHUNK, end - buffer.tell())):
            buffer.write(chunk)
        return buffer.getvalue()

    def _read_data(self, max_bytes: int) -> bytes:
        wanted = min(max_bytes, self._data_left)
        data = self._read_some(wanted)
        self._data_left -= len(data)
        if len(data) < wanted:
            raise self._damage(f"the file ends {self._data_left} bytes inside a member")
        return data

    def _next_member(self) -> Member | None:
        """Return the next real member, with the extended headers before it applied."""
        extended: dict[str, str] = {}
        while (block := self._read_header()) is not None:
            info = self._parse(block)
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extended.update(self._read_pax(info.size))
            elif info.type == tarfile.XGLTYPE:
                self._read_pax(info.size)  # comments and the like; checked, and not used
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                extended["path"] = self._read_text(info.size)
            elif info.type == tarfile.GNUTYPE_LONGLINK:
                extended["linkpath"] = self._read_text(info.size)
            else:
                return self._begin(info, extended, block)
        if extended:
            raise self._damage("an extended header with no member after it")
        return None

    def _begin(self, info: tarfile.TarInfo, extended: dict[str, str], block: bytes) -> Member:
        """Note how much data follows a member's header, and name what it is."""
        is_sparse = info.type == tarfile.GNUTYPE_SPARSE
        has_more_map = is_sparse and block[482]
        while has_more_map:  # the map of an old GNU sparse member may go on in further blocks
            has_more_map = bool(self._read_exactly(BLOCK)[504])
        size = info.size
        if "size" in extended:
            size = self._number(extended["size"])
        has_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
        self._data_left = size if has_data else 0
        self._padding = -self._data_left % BLOCK
        name = extended.get("GNU.sparse.name") or extended.get("path") or info.name
        if is_sparse or any(field.startswith("GNU.sparse.") for field in extended):
            kind = "sparse"
        elif info.isdir():
            kind = "folder"
        elif info.islnk() or info.issym():
            kind = "link"
        else:
            kind = "file" if has_data else "special"
        return Member(name, self._data_left, kind, extended.get("linkpath") or info.linkname)

    def _parse(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._damage(
                f"no tar header (it begins with {block[:16]!r}: {error})", back=BLOCK
            ) from None
        if info.size < 0:
            raise self._damage(f"a header with the size {info.size}", back=BLOCK)
        return info

    def _read_header(self) -> bytes | None:
        """Return the next header block, or None at the end of the archive."""
        block = self._read_some(BLOCK)
        if not block and not self._offset:
            raise ShardError(self._url, "the file is empty (0 bytes), wanted a tar")
        if not block:
            if self._has_lenient_end:
                return None
            raise self._damage("no end-of-archive marker: the file was cut, or never finished")
        if len(block) < BLOCK:
            raise self._damage(f"a header cut after {len(block)} bytes", back=len(block))
        return None if block.count(0) == BLOCK else block

    def _check_tail(self) -> None:
        """After the first zero block, all that may follow is more of them."""
        end = self._offset - BLOCK
        while chunk := self._read_some(CHUNK):
            if chunk.count(0) != len(chunk):
                raise self._damage("data after the end marker: a hole of zeros, or joined tars")
        tail = self._offset - end
        if self._has_lenient_end:
            return
        if tail % BLOCK:
            raise self._damage("the end padding is cut inside a block")
        if tail > MAX_TAIL_BYTES:
            raise self._damage(f"{tail} zero bytes at the end: a transfer that never finished?")

    def _skip_data(self) -> None:
        passed = self._skip_some(self._data_left)
        self._data_left -= passed
        if self._data_left:
            raise self._damage(f"the file ends {self._data_left} bytes inside a member")
        self._read_exactly(self._padding)
        self._padding = 0

    def _read_pax(self, size: int) -> dict[str, str]:
        """Parse the records `LENGTH KEY=VALUE\\n` of a PAX header (POSIX.1-2001, pax)."""
        data = self._read_extended(size)
        records: dict[str, str] = {}
        while data.rstrip(b"\0"):
            length = self._number(data[:20].partition(b" ")[0].decode("ascii", "replace"))
            keyword, equals, value = data[:length].partition(b" ")[2].partition(b"=")
            if not equals or not value.endswith(b"\n") or length > len(data):
                raise self._damage("a PAX header that makes no sense")
            name = keyword.decode("utf-8", "backslashreplace")
            records[name] = value[:-1].decode("utf-8", "backslashreplace")
            data = data[length:]
        return records

    def _read_text(self, size: int) -> str:
        text = self._read_extended(size).partition(b"\0")[0]
        return text.decode("utf-8", "backslashreplace")

    def _read_extended(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise self._damage(f"an extended header of {size} bytes")
        data = self._read_exactly(size)
        self._read_exactly(-size % BLOCK)
        return data

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self._damage(f"a PAX header with {text!r} for a number")
        return int(text)

    def _read_exactly(self, size: int) -> bytes:
        data = self._read_some(size)
        if len(data) < size:
            raise self._damage(f"the file ends {size - len(data)} bytes inside a member")
        return data

    def _read_some(self, size: int) -> bytes:
        """Read up to `size` bytes, fewer only at the end; a decompressor may fail in any way."""
        try:
            data = self._stream.read(size)
            while 0 < len(data) < size and (more := self._stream.read(size - len(data))):
                data += more
        except (OSError, EOFError, MemoryError, zlib.error, lzma.LZMAError) as error:
            raise self._damage(f"reading failed: {error or type(error).__name__}") from error
        self._offset += len(data)
        return data

    def _skip_some(self, size: int) -> int:
        """Pass over up to `size` bytes, fewer only at the end; a plain file is sought past."""
        skip = getattr(self._stream, "skip", None)
        passed = 0
        try:
            if skip is not None:
                passed = int(skip(size))
                self._offset += passed
        except OSError as error:
            raise self._damage(f"reading failed: {error}") from error
        while (
            skip is None and passed < size and (data := self._read_some(min(CHUNK, size - passed)))
        ):
            passed += len(data)
        return passed

    def _damage(self, what: str, *, back: int = 0) -> ShardError:
        return ShardError(self._url, f"damaged at byte {self._offset - back} of the tar: {what}")


def decompressed(stream: ReadAhead, url: str) -> IO[bytes]:
    """Return the tar inside gzip, bzip2, xz or zstd, told by the first bytes, or `stream`."""
    try:
        head = stream.peek(6)[:6]
    except OSError as error:
        raise ShardError(url, f"reading failed: {error}") from error
    if head[:2] == b"\x1f\x8b":
        # gzip's own reader checks the CRC and reads several members; tarfile's does neither.
        return cast(BinaryIO, gzip.GzipFile(fileobj=cast(BinaryIO, stream)))
    if head[:3] == b"BZh":
        return cast(BinaryIO, bz2.BZ2File(cast(BinaryIO, stream)))
    if head == b"\xfd7zXZ\x00":
        return cast(BinaryIO, lzma.LZMAFile(cast(BinaryIO, stream)))
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return _zstd(stream, url)
    if head[:4] == b"PAR1":
        raise ShardError(
            url, "a Parquet file; wanted one whose name ends in .parquet, and not from a command"
        )
    return cast(BinaryIO, stream)


def _zstd(stream: ReadAhead, url: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ShardError(
            url, "compressed with zstd, which needs: pip install 'captionjob[zstd]'"
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(
        cast(BinaryIO, stream), read_across_frames=True
    )
    return cast(BinaryIO, _ZstdStream(reader, zstandard.ZstdError))


class _ZstdStream:
    """zstandard raises an error class of its own; here it becomes an OSError like the others."""

    def __init__(self, reader: IO[bytes], error: type[Exception]) -> None:
        self._reader = reader
        self._error = error

    def read(self, size: int) -> bytes:
        try:
            return self._reader.read(size)
        except self._error as error:
            raise OSError(str(error)) from error
