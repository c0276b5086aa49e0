"""What a run was asked to do, checked once, where it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jobs.claiming import ClaimSettings
from jobs.ranks import Place
from pipeline.backends.resolve import resolve
from pipeline.captioner import ModelSource, SamplingSettings, SpeedSettings
from pipeline.errors import RequestError
from pipeline.images.opening import ImageSettings
from pipeline.output.folder import OutFolder, open_folder
from pipeline.output.job_record import JobRecord, Setting
from pipeline.output.schema import RowSchema
from pipeline.output.store import CommitSettings
from pipeline.output.waiting import STORE_RETRY_SECONDS, Waiting
from pipeline.prompts import PromptTemplate, fields_needed
from pipeline.records import Columns
from pipeline.remote.spool import SpoolSettings

MIN_IMAGES_FOR_RATE = 100  # before that, an error rate says little


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """When to stop before the end."""

    samples: int | None = None  # the first so many of the job; None: all
    max_error_rate: float = 1.0
    seconds: float | None = None  # of wall time, grace included
    grace_seconds: float = 20.0
    store_seconds: float = STORE_RETRY_SECONDS  # an output's store that is down is waited for

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise RequestError(f"--limit is {self.samples}; wanted 1 or more")
        if not 0 <= self.max_error_rate <= 1:
            raise RequestError(f"--max-error-rate is {self.max_error_rate}; wanted 0 to 1")
        if not self.store_seconds >= 0:
            raise RequestError(f"--store-retry-seconds is {self.store_seconds}; wanted 0 or more")
        if not self.grace_seconds > 0:
            raise RequestError(f"--grace-seconds is {self.grace_seconds}; wanted more than 0")
        if self.seconds is not None and self.seconds <= self.grace_seconds:
            raise RequestError(
                f"--time-limit is {self.seconds:g} s; wanted more than --grace-seconds "
                f"({self.grace_seconds:g} s), which is taken off it"
            )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Which part of the shards this process takes, and how it reads them."""

    place: Place = field(default_factory=Place)
    loader_workers: int = 4
    is_claiming: bool = False  # shards are taken by lease, one by one, not dealt out
    claims: ClaimSettings = field(default_factory=ClaimSettings)

    def __post_init__(self) -> None:
        if self.loader_workers < 1:
            raise RequestError(f"--loader-workers is {self.loader_workers}; wanted 1 or more")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run of one worker."""

    shards: tuple[str, ...]
    out: Path | str  # a folder, or an address such as s3://bucket/prefix
    model: str = "default"
    backend: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"  # or int8
    system: str | None = None  # the system prompt; None: the chat template's own
    trust_remote_code: bool = False
    prompt: str | None = None  # None: the model's own
    keep: tuple[str, ...] = ()
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    commit: CommitSettings = field(default_factory=CommitSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    dedupe: bool = False  # identical images of a shard are captioned once
    overwrite: bool = False
    allow_pipe: bool = False
    has_lenient_end: bool = False
    columns: Columns = field(default_factory=Columns)  # of Parquet shards
    spool: SpoolSettings | None = None  # of remote tars
    retry: frozenset[str] = frozenset()  # statuses of finished shards' rows to make again

    def __post_init__(self) -> None:
        fields_needed(self.keep)  # raises for what is no field's name
        assert self.schema  # raises for a field that would take a column's name
        if self.retry and (self.overwrite or self.limits.samples is not None):
            raise RequestError("--retry goes neither with --overwrite nor with --limit")
        if self.worker.is_claiming and (self.retry or self.overwrite or self.limits.samples):
            raise RequestError("--claim goes with none of --retry, --overwrite and --limit")
        if self.limits.samples is not None and self.worker.place.world_size > 1:
            raise RequestError("--limit counts the samples of the whole job; wanted one worker")

    @property
    def schema(self) -> RowSchema:
        """The columns of this job."""
        return RowSchema(self.sampling.num_captions, self.keep)

    def folder(self, waiting: Waiting | None = None) -> OutFolder:
        """Open the output folder; nothing is looked at yet."""
        return open_folder(self.out, waiting or Waiting(self.limits.store_seconds))

    def source(self) -> ModelSource:
        """Find the model, its weights not yet loaded."""
        return resolve(
            self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.speed.device,
            quantize=self.quantize,
            system=self.system,
            trust_remote_code=self.trust_remote_code,
        )

    def template(self, source: ModelSource) -> PromptTemplate:
        """The prompt, the model's own if none was given."""
        return PromptTemplate(self.prompt if self.prompt is not None else source.default_prompt)

    def record(self, source: ModelSource) -> JobRecord:
        """Everything that shapes captions; nothing that only shapes speed."""
        sampling = self.sampling
        settings: dict[str, Setting] = {
            f"model.{name}": value for name, value in source.fingerprint.items()
        }
        settings |= {
            "system": self.system or "",
            "prompt": self.template(source).text,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "num_captions": sampling.num_captions,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "max_text_tokens": sampling.max_text_tokens,
            "max_repeats": sampling.max_repeats,
            "max_pixels": self.images.max_pixels,
            "background": self.images.background,
            "allow_truncated": self.images.allow_truncated,
            "keep": list(self.keep),
        }
        if self.dedupe and sampling.temperature > 0:  # greedy captions are the same without it
            settings["dedupe"] = True
        # Only where they are chosen: a job over tars has no columns.
        chosen = {"image_column": self.columns.image, "key_column": self.columns.key}
        settings |= {name: column for name, column in chosen.items() if column is not None}
        return JobRecord(settings)
