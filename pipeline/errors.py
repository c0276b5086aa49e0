"""What can fail, and how far each failure reaches.

CaptionJobError
├── SampleError       costs one row: the picture or its prompt is at fault
├── ShardError        costs one shard: the file is damaged or unreachable
└── JobError          costs the job, before or after it has written anything
    ├── StoreDownError     the output's store does not answer, and was waited for
    ├── RequestError  the request itself is wrong (exit code 2, found before weights load)
    └── CheckpointError   the model folder is wrong, partial or of an unknown family

Raise these for what a user, a file or a checkpoint can cause. What only our own bug can
cause is an `assert`.
"""

from __future__ import annotations


class CaptionJobError(Exception):
    """Any failure that captionjob explains in one line."""


class SampleError(CaptionJobError):
    """One sample cannot be captioned; the job writes an error row and goes on."""

    def __init__(self, code: str, detail: str) -> None:
        """Name the failure by a short stable `code` and a `detail` for people."""
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, str]]:
        return type(self), (self.code, self.detail)


class ShardError(CaptionJobError):
    """One shard cannot be read to its end; what it held so far is kept."""

    def __init__(self, shard: str, detail: str) -> None:
        """Name the shard by its url or path, and say what was found and what was wanted."""
        super().__init__(f"{shard}: {detail}")
        self.shard = shard
        self.detail = detail

    def __reduce__(self) -> tuple[type[ShardError], tuple[str, str]]:
        return type(self), (self.shard, self.detail)


class JobError(CaptionJobError):
    """The whole job cannot go on."""


class StoreDownError(JobError):
    """The store that holds the output does not answer; what was committed there stays."""


class RequestError(JobError):
    """The request is wrong: a path, an option, or a setting that conflicts with the output."""


class CheckpointError(RequestError):
    """A model folder is wrong, partial, or of a family that is not known."""
