"""The command line's words to a checked `RunConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.claiming import ClaimSettings
from jobs.config import LimitSettings, RunConfig, WorkerSettings
from jobs.ranks import find_place
from jobs.sharing import device_of, loaders_of, threads_of
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.errors import RequestError
from pipeline.images.opening import ImageSettings
from pipeline.output.retry import parse_retry
from pipeline.output.store import CommitSettings
from pipeline.records import Columns
from pipeline.remote.spool import SpoolSettings

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def run_config(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Build the settings of `captionjob run`; RequestError names an option that is wrong."""
    is_claiming = options["claim"]
    place = find_place(options["rank"], options["world_size"], environ, is_claiming=is_claiming)
    loader_workers = options["loader_workers"]
    time_limit = options["time_limit"]
    return RunConfig(
        shards=options["shards"],
        out=options["out"],
        model=options["model"],
        backend=options["backend"],
        dtype=options["dtype"],
        quantize=options["quantize"],
        system=options["system"],
        trust_remote_code=options["trust_remote_code"],
        prompt=options["prompt"],
        keep=options["keep"],
        sampling=SamplingSettings(
            max_new_tokens=options["max_new_tokens"],
            min_new_tokens=options["min_new_tokens"],
            temperature=options["temperature"],
            top_p=options["top_p"],
            top_k=options["top_k"],
            repetition_penalty=options["repetition_penalty"],
            num_captions=options["num_captions"],
            seed=options["seed"],
            stop=options["stop"],
            max_text_tokens=options["max_text_tokens"],
            max_repeats=options["max_repeats"],
        ),
        images=ImageSettings(
            options["max_pixels"], options["background"], options["allow_truncated"]
        ),
        speed=SpeedSettings(
            slots=options["slots"],
            prefill_batch=options["prefill_batch"],
            device=device_of(options["device"], place),
            threads=options["threads"] or threads_of(place, environ),
        ),
        commit=CommitSettings(options["commit_rows"], options["commit_seconds"]),
        limits=LimitSettings(
            samples=options["limit"],
            max_error_rate=options["max_error_rate"],
            seconds=None if time_limit is None else seconds_of(time_limit),
            grace_seconds=options["grace_seconds"],
            store_seconds=options["store_retry_seconds"],
        ),
        worker=WorkerSettings(
            place,
            loaders_of(place) if loader_workers is None else loader_workers,
            is_claiming,
            ClaimSettings(options["lease_seconds"]),
        ),
        dedupe=options["dedupe"],
        overwrite=options["overwrite"],
        allow_pipe=options["allow_pipe"],
        has_lenient_end=options["lenient_end"],
        columns=Columns(options["image_column"], options["key_column"]),
        spool=_spool(options),
        retry=_retry(options["retry"], is_failed=options["retry_failed"]),
    )


def _spool(options: Mapping[str, Any]) -> SpoolSettings | None:
    if options["spool"] is None:
        return None
    folder = Path(options["spool"])
    return SpoolSettings(folder, options["spool_bytes"], options["spool_shards"])


def _retry(text: str | None, *, is_failed: bool) -> frozenset[str]:
    statuses = parse_retry(text) if text is not None else frozenset()
    return statuses | {"error"} if is_failed else statuses


def seconds_of(text: str, option: str = "--time-limit") -> float:
    """Read `3600`, `90m`, `1h30m`, `1:30:00`, `1-12:00:00`; RequestError for anything else."""
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        parts = re.findall(r"([\d.]+)([smhd])", text)
        return sum(float(count) * _UNITS[unit] for count, unit in parts)
    raise RequestError(f"{option} is {text!r}; wanted a time such as 90m, 3h or 1:30:00")
