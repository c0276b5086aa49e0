"""Large objects that go up in parts, and what is left of uploads whose process died.

    OUT/_uploads/<host>-<process>-<random>    a note of an upload under way: its key and its id

The parts are seen by nobody until the upload is completed, in one request that has the same
conditions as a put. Parts that were never completed cost money and are no files, so at the start
of a run they are aborted: at once where a note says that a process of this host began them and
it is gone, and after a day in any case. An upload that is gone under its writer's hands is begun
anew, so that even a wrong guess costs time alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any, Protocol

from pipeline.errors import JobError, StoreDownError
from pipeline.fault_points import reach
from pipeline.output.commit import ORPHAN_SECONDS, is_of_dead_process, writer_name
from pipeline.output.folder import UPLOADS, Stat
from pipeline.output.s3_calls import Calls
from pipeline.output.s3_files import S3Draft
from pipeline.remote.faults import RemoteError

TOKEN = "captionjob-put"  # in the metadata of each object
_MAX_TRIES = 5


class Notes(Protocol):
    """The folder, as far as notes need it."""

    def walk(self, folder: str = "", *, is_deep: bool = True) -> dict[str, Stat]:
        """Return the files of a folder."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file."""
        ...

    def replace(self, name: str, data: bytes, point: str = "") -> None:
        """Put a file."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file."""
        ...


class Uploads:
    """Multipart uploads below one prefix."""

    def __init__(self, calls: Calls, prefix: str, notes: Notes) -> None:
        """Make requests by `calls`."""
        self._calls = calls
        self._prefix = prefix
        self._notes = notes
        self._probe = f"{prefix}{UPLOADS}/probe"
        self._is_probed = False

    def put(
        self, draft: S3Draft, name: str, condition: dict[str, str], token: str, part_bytes: int
    ) -> None:
        """Put a draft in parts; RemoteError where the condition does not hold."""
        key = f"{self._prefix}{name}"
        for _ in range(_MAX_TRIES):
            upload = self._begin(key, token)
            note = f"{UPLOADS}/{writer_name()}"
            try:
                text = json.dumps({"key": key, "upload": upload})
                self._notes.replace(note, text.encode())
                parts = self._put_parts(draft, key, upload, part_bytes)
                self._complete(key, upload, parts, condition)
            except FileNotFoundError:
                # The upload is gone: completed, its answer lost, or aborted by somebody.
                if self._is_there(key, token):
                    return
                continue
            except (RemoteError, OSError, JobError) as error:
                if not isinstance(error, StoreDownError):
                    self._abort(key, upload)
                raise
            else:
                return
            finally:
                with contextlib.suppress(JobError):
                    self._notes.remove(note)
        raise JobError(f"{self._calls.url}: uploads vanish whenever they are begun")

    def probe(self) -> None:
        """Begin an upload and abort it; RequestError where writing is denied."""
        if not self._is_probed:
            self._abort(self._probe, self._begin(self._probe, "", is_check=True))
            self._is_probed = True

    def sweep(self) -> None:
        """Abort what dead writers left; what the store does not let us see is let be."""
        now = time.time()
        try:
            for name, stat in self._notes.walk(UPLOADS).items():
                self._sweep_note(name, now - stat.modified)
            for key, upload, began in list(self._all()):
                if key == self._probe or now - began > ORPHAN_SECONDS:
                    self._abort(key, upload)
        except StoreDownError:
            raise
        except JobError:
            return  # the right to list uploads is not needed for anything else

    def _sweep_note(self, name: str, age: float) -> None:
        writer = name.rpartition("/")[2]
        is_dead = is_of_dead_process(writer)
        if is_dead is False or (is_dead is None and age <= ORPHAN_SECONDS):
            return
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            found = json.loads(self._notes.read(name))
            self._abort(str(found["key"]), str(found["upload"]))
        self._notes.remove(name)

    def _all(self) -> Iterator[tuple[str, str, float]]:
        """Yield each upload below the prefix: its key, its id, and when it was begun."""
        more: dict[str, str] = {}
        while True:
            page = self._calls.make(
                "uploads",
                lambda: self._client.list_multipart_uploads(
                    Bucket=self._calls.bucket,
                    Prefix=self._prefix,
                    **more,  # noqa: B023
                ),
            )
            for one in page.get("Uploads", []):
                yield one["Key"], one["UploadId"], one["Initiated"].timestamp()
            if not page.get("IsTruncated"):
                return
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    @property
    def _client(self) -> Any:
        return self._calls.client

    def _begin(self, key: str, token: str, *, is_check: bool = False) -> str:
        found = self._calls.make(
            "put",
            lambda: self._client.create_multipart_upload(
                Bucket=self._calls.bucket, Key=key, Metadata={TOKEN: token} if token else {}
            ),
            is_check=is_check,
        )
        return str(found["UploadId"])

    def _put_parts(
        self, draft: S3Draft, key: str, upload: str, part_bytes: int
    ) -> list[dict[str, object]]:
        parts: list[dict[str, object]] = []
        for start in range(0, draft.size, part_bytes):
            data, number = draft.part(start, part_bytes), len(parts) + 1
            answer = self._calls.make(
                "put",
                lambda: self._client.upload_part(
                    Bucket=self._calls.bucket,
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,  # noqa: B023
                    Body=data,  # noqa: B023
                ),
            )
            part: dict[str, object] = {"PartNumber": number, "ETag": answer["ETag"]}
            # Where checksums are made of parts, completing wants them again.
            part |= {name: answer[name] for name in answer if name.startswith("Checksum")}
            part.pop("ChecksumType", None)
            parts.append(part)
            reach("part-put")
        return parts

    def _complete(
        self, key: str, upload: str, parts: list[dict[str, object]], condition: dict[str, str]
    ) -> None:
        self._calls.make(
            "put",
            lambda: self._client.complete_multipart_upload(
                Bucket=self._calls.bucket,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                **condition,
            ),
        )

    def _abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError, JobError):
            self._calls.make(
                "remove",
                lambda: self._client.abort_multipart_upload(
                    Bucket=self._calls.bucket, Key=key, UploadId=upload
                ),
            )

    def _is_there(self, key: str, token: str) -> bool:
        try:
            found = self._calls.make(
                "read", lambda: self._client.head_object(Bucket=self._calls.bucket, Key=key)
            )
        except FileNotFoundError:
            return False
        return bool(found.get("Metadata", {}).get(TOKEN) == token)
