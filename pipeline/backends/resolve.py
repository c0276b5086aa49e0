"""From what the user calls a model to a source that can load it; nothing heavy happens here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.captioner import ModelSource
from pipeline.errors import CheckpointError, RequestError

BACKENDS = ("auto", "native", "transformers")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


def resolve(
    model: str, *, backend: str = "auto", dtype: str = "auto", device: str = "auto"
) -> ModelSource:
    """Return the source of `default`, a checkpoint folder or a hub id.

    Raises CheckpointError, in one line, where there is no such model, and RequestError where
    an option is wrong for it.
    """
    if backend not in BACKENDS:
        raise RequestError(f"--backend is {backend!r}; wanted {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise RequestError(f"--dtype is {dtype!r}; wanted {', '.join(DTYPES)}")
    if model == "scripted" or model.startswith("scripted:"):
        from pipeline.backends.scripted import ScriptedSettings, ScriptedSource

        return ScriptedSource(ScriptedSettings.parse(model))
    if model == "default":
        if backend == "transformers":
            raise RequestError("--model default is our own network; wanted --backend native")
        from pipeline.backends.native_source import default_source

        return default_source(device, dtype)
    return _checkpoint(model, backend=backend)


def _checkpoint(model: str, *, backend: str) -> ModelSource:
    """Find a checkpoint's folder; no family is read from folders yet."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"--model {model!r}: the folder has no config.json")
        raise CheckpointError(f"--model {model!r}: no family here reads this folder")
    if folder.exists():
        raise CheckpointError(f"--model {model!r} is a file; wanted a checkpoint's folder")
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "~", os.sep)):
        raise CheckpointError(
            f"--model {model!r}: there is no such folder, and models from the hub are not read yet"
        )
    raise CheckpointError(f"--model {model!r}: wanted `default` or a checkpoint's folder")
