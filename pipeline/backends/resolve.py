"""From what the user calls a model to a source that can load it; nothing heavy happens here."""

from __future__ import annotations

from pipeline.captioner import ModelSource
from pipeline.errors import RequestError

BACKENDS = ("auto", "native", "transformers")
QUANTIZE = ("none", "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve(
    model: str,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    quantize: str = "none",
    system: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Return the source of `default`, a checkpoint folder or a hub id.

    Raises CheckpointError, in one line, where there is no such model, and RequestError where
    an option is wrong for it.
    """
    if backend not in BACKENDS:
        raise RequestError(f"--backend is {backend!r}; wanted {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise RequestError(f"--dtype is {dtype!r}; wanted {', '.join(DTYPES)}")
    if quantize not in QUANTIZE:
        raise RequestError(f"--quantize is {quantize!r}; wanted {', '.join(QUANTIZE)}")
    if model == "scripted" or model.startswith("scripted:"):
        from pipeline.backends.scripted import ScriptedSettings, ScriptedSource

        if quantize != "none":
            raise RequestError(
                f"--quantize {quantize}: --model scripted has no weights; wanted --quantize none"
            )
        return ScriptedSource(ScriptedSettings.parse(model))
    if model == "default":
        if backend == "transformers":
            raise RequestError("--model default is our own network; wanted --backend native")
        if system is not None:
            raise RequestError("--system: the default model has no system prompt; wanted none")
        from pipeline.backends.native_source import default_source

        return default_source(device, dtype, quantize)
    from pipeline.backends.checkpoint_source import checkpoint_source

    return checkpoint_source(
        model,
        backend=backend,
        dtype=dtype,
        device=device,
        quantize=quantize,
        system=system,
        trust_remote_code=trust_remote_code,
    )
