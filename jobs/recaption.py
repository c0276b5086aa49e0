"""`verify --sample N`: random rows captioned again, alone, by the network of `_job.json`.

A caption is to depend on its image and prompt only. So each of the rows drawn goes through the
network at batch 1, and must come out as it is stored. On a device whose sums depend on the
batch's shape two nearly equal logits may change places: then the two are shown.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.config import RunConfig
from jobs.doubles import Double, Doubles
from jobs.feed import Preparer
from jobs.joining import Join, joined_rows
from jobs.results import Output
from pipeline.backends.trace import TokenDifference, first_difference
from pipeline.captioner import Captioner, SamplingSettings, SpeedSettings
from pipeline.errors import CheckpointError, RequestError
from pipeline.images.opening import ImageSettings
from pipeline.input.reader import ReaderSettings
from pipeline.output.job_record import Setting
from pipeline.prompts import fields_needed
from pipeline.records import Request, Row, Sample


@dataclass(frozen=True, slots=True)
class Recaptioned:
    """A stored row, and the one that the same image has when it is captioned alone."""

    stored: Row
    fresh: Row
    difference: TokenDifference | None = None  # where the captions part, if the backend tells

    @property
    def is_same(self) -> bool:
        """True if text, length, ending and error are exactly the stored ones."""
        return _shape(self.stored) == _shape(self.fresh)

    @property
    def logprob_gap(self) -> float:
        """How far the mean log-probabilities are apart."""
        stored, fresh = self.stored.mean_logprob, self.fresh.mean_logprob
        return 0.0 if stored is None or fresh is None else abs(stored - fresh)


@dataclass(slots=True)
class OneByOne:
    """A source of requests that are all there already."""

    requests: list[Request]

    def take(self, max_requests: int, *, block: bool) -> list[Request]:
        """Return the next one."""
        return [self.requests.pop(0)] if self.requests and max_requests else []

    @property
    def is_exhausted(self) -> bool:
        """True once all were taken."""
        return not self.requests


@dataclass(frozen=True, slots=True)
class Recaptioner:
    """The job of an output folder, rebuilt to run one image at a time."""

    config: RunConfig
    captioner: Captioner
    preparer: Preparer

    @classmethod
    def of(
        cls, output: Output, model: str | None, device: str, trust_remote_code: bool = False
    ) -> Recaptioner:
        """Load the network that made `output`; RequestError if it is not to be had."""
        config = replace(config_of(output, model, device), trust_remote_code=trust_remote_code)
        try:
            source = config.source()
        except CheckpointError as error:
            raise RequestError(f"--sample: {error}; name its place with --model") from error
        differences = output.record.differences(config.record(source).settings)
        if differences:
            raise RequestError(
                f"--sample needs the network that made the captions ({'; '.join(differences)}); "
                "name it with --model"
            )
        captioner = source.load(config.sampling, config.speed)
        preparer = Preparer(
            captioner,
            config.template(source),
            config.images,
            config.keep,
            config.sampling.num_captions,
        )
        return cls(config, captioner, preparer)

    def again(self, sample: Sample, stored: Sequence[Row]) -> Iterator[Recaptioned]:
        """Caption one image alone; yield each of its rows with the fresh one."""
        made = self._prepare(sample)
        if isinstance(made, list):
            fresh = made
        else:
            answers = self.captioner.caption(OneByOne([made]))
            fresh = sorted(map(Row.from_caption, answers), key=lambda row: row.caption_index)
        for old, new in zip(stored, fresh, strict=True):
            difference = None
            if not isinstance(made, list) and old.caption is not None and new.caption is not None:
                most = self.config.sampling.max_new_tokens
                difference = first_difference(self.captioner, made, old.caption, new.caption, most)
            yield Recaptioned(old, new, difference)

    def _prepare(self, sample: Sample) -> Request | list[Row]:
        """Make a request as the job did: with --dedupe it is known by its content."""
        doubles = Doubles(self.config.sampling.num_captions) if self.config.dedupe else None
        made = replace(self.preparer, doubles=doubles)(sample)
        assert not isinstance(made, Double), "an image alone is the first"
        return made

    @property
    def reader_settings(self) -> ReaderSettings:
        """Which fields of a sample the prompt and the kept columns need."""
        needed = self.preparer.template.needs_fields
        return ReaderSettings(needed | fields_needed(self.config.keep))


def recaption(recaptioner: Recaptioner, join: Join, count: int, seed: int) -> Iterator[Recaptioned]:
    """Yield `count` random images' rows, captioned again one by one."""
    drawn = _draw(join, count, seed)
    for place, pair in enumerate(join.pairs):
        wanted = drawn.get(place, frozenset())
        if wanted:
            rows = [row for row in pair.result.rows() if row.ref.index in wanted]
            for sample, stored in joined_rows(pair, rows, recaptioner.reader_settings):
                yield from recaptioner.again(sample, stored)


def config_of(output: Output, model: str | None, device: str) -> RunConfig:
    """Return the settings that made an output, at batch 1."""
    get = _Settings(output.record.settings)
    num_captions = output.num_captions
    backend = get.text("model.backend")
    return RunConfig(
        shards=(),
        out=output.folder.url,
        model=model or output.model,
        backend=backend if backend in ("native", "transformers") else "auto",
        dtype=get.text("model.dtype") or "auto",
        quantize=get.text("model.quantize") or "none",
        system=get.text("system") or None,
        prompt=output.prompt,
        keep=tuple(output.schema.kept),
        sampling=SamplingSettings(
            max_new_tokens=get.whole("max_new_tokens"),
            min_new_tokens=get.whole("min_new_tokens"),
            temperature=get.number("temperature"),
            top_p=get.number("top_p"),
            top_k=get.whole("top_k"),
            repetition_penalty=get.number("repetition_penalty"),
            num_captions=num_captions,
            seed=get.whole("seed"),
            stop=get.texts("stop"),
            max_text_tokens=get.whole("max_text_tokens"),
            max_repeats=get.whole("max_repeats"),
        ),
        images=ImageSettings(
            get.whole("max_pixels"), get.text("background"), bool(get.whole("allow_truncated"))
        ),
        columns=output.columns,
        speed=SpeedSettings(slots=num_captions, prefill_batch=1, device=device),
        dedupe=bool(output.record.settings.get("dedupe")),
    )


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of `_job.json` by type; RequestError for one that is not there."""

    found: Mapping[str, Setting]

    def whole(self, name: str) -> int:
        return int(self.number(name))

    def number(self, name: str) -> float:
        value = self.found.get(name)
        if isinstance(value, int | float):
            return value
        raise RequestError(f"_job.json has no number {name}: it is of another version")

    def text(self, name: str) -> str:
        return str(self.found.get(name) or "")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.found.get(name)
        return tuple(value) if isinstance(value, list) else ()


def _draw(join: Join, count: int, seed: int) -> dict[int, frozenset[int]]:
    """Choose images at random over all shards: place of the pair -> indices."""
    images = [
        (place, index)
        for place, pair in enumerate(join.pairs)
        for index in sorted(set(pair.result.table(["index"]).column("index").to_pylist()))
    ]
    chosen = random.Random(seed).sample(images, min(count, len(images)))
    drawn: dict[int, set[int]] = {}
    for place, index in chosen:
        drawn.setdefault(place, set()).add(index)
    return {place: frozenset(indices) for place, indices in drawn.items()}


def _shape(row: Row) -> tuple[object, ...]:
    return row.status, row.caption, row.error, row.finish_reason, row.num_caption_tokens
