"""From a checkpoint's folder or hub id to a source that loads it, native where the family is."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.backends.native_source import NativeSource
from pipeline.backends.placement import Placement
from pipeline.captioner import ModelSource
from pipeline.checkpoints import (
    IDEFICS3,
    LLAVA,
    NANOVLM,
    CheckpointFolder,
    Family,
    find_checkpoint,
    find_tokenizer,
    recognise,
)
from pipeline.errors import CheckpointError, RequestError
from pipeline.models.language import DecoderSpec
from pipeline.models.stored import WeightFiles, read_config, weights_sha256
from pipeline.models.vlm import CaptionModel, VisionLanguageModel
from pipeline.models.weights import Layout, check_weights, load_weights
from pipeline.processors.processor import Processor

NATIVE = (NANOVLM, IDEFICS3, LLAVA)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """How many numbers a checkpoint's weights are, and its cache is a token."""

    num_weights: int
    cache_numbers_per_token: int

    @classmethod
    def of(cls, folder: CheckpointFolder) -> MemoryNeed:
        """Read it off a folder of a native family, without its weights."""
        spec = _decoder_spec(folder, recognise(folder))
        numbers = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        return cls(WeightFiles.find(folder.path).num_parameters, numbers)


def checkpoint_source(
    model: str,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    quantize: str = "none",
    system: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Return the source of a checkpoint's folder or hub id; its weights are not read yet.

    `auto` takes our own network where it runs the family, and transformers elsewhere; the
    source's `backend` says which. Raises CheckpointError, in one line, for a wrong checkpoint.
    """
    folder = find_checkpoint(model, with_code=trust_remote_code)
    family = recognise(folder)
    if backend == "native" and family not in NATIVE:
        kind = read_config(folder.path).text("model_type", "unknown")
        raise CheckpointError(
            f"--model {model!r}: our own networks do not run model_type {kind}; "
            "wanted --backend transformers"
        )
    if backend == "transformers" and family is NANOVLM:
        raise CheckpointError(
            f"--model {model!r}: transformers does not know nanoVLM; wanted --backend native"
        )
    if backend != "transformers" and family in NATIVE:
        try:
            where = Placement.choose(device, dtype, quantize)
            return _native_source(folder, family, where, system)
        except CheckpointError:
            if backend == "native" or family is NANOVLM or not _is_unrun(folder, family):
                raise
    if quantize != "none":
        raise RequestError(
            f"--quantize {quantize}: --model {model!r} runs on transformers; wanted a network of "
            "our own (see `captionjob models`), or --quantize none"
        )
    from pipeline.backends.transformers_source import transformers_source

    placement = Placement.choose(device, dtype)
    return transformers_source(
        folder, placement, system=system, trust_remote_code=trust_remote_code
    )


def _is_unrun(folder: CheckpointFolder, family: Family) -> bool:
    """True if the config itself asks for what our network does not run, such as biases."""
    try:
        _decoder_spec(folder, family)
    except CheckpointError:
        return True
    return False


def _decoder_spec(folder: CheckpointFolder, family: Family) -> DecoderSpec:
    config = read_config(folder.path)
    if family is NANOVLM:
        from pipeline.models.nanovlm import NanoVLMSpec

        return NanoVLMSpec.from_config(config).decoder
    if family is IDEFICS3:
        from pipeline.models.idefics3 import Idefics3Spec

        return Idefics3Spec.from_config(config).decoder
    if family is LLAVA:
        from pipeline.models.llava import LlavaSpec

        return LlavaSpec.from_config(config).decoder
    raise CheckpointError(f"--model {folder.name!r}: {family.name} is not a native family")


def _native_source(
    folder: CheckpointFolder, family: Family, placement: Placement, system: str | None
) -> NativeSource:
    check_weights(*_blank(folder, family), folder.path)
    checksum = weights_sha256(folder.path)

    def build(where: Placement) -> CaptionModel:
        model, layout = _blank(folder, family)
        load_weights(model, layout, folder.path, where.dtype, where.device)
        return model

    return NativeSource(
        name=folder.name,
        family=family.name,
        weights_sha256=checksum,
        processor=_processor(folder, family, system),
        placement=placement,
        build=build,
    )


def _blank(folder: CheckpointFolder, family: Family) -> tuple[VisionLanguageModel, Layout]:
    """Build a family's network without its weights, and say what fills it."""
    if family is NANOVLM:
        from pipeline.models.nanovlm import blank_nanovlm

        return blank_nanovlm(folder.path)
    if family is IDEFICS3:
        from pipeline.models.idefics3 import blank_idefics3

        return blank_idefics3(folder.path)
    from pipeline.models.llava import blank_llava

    return blank_llava(folder.path)


def _processor(folder: CheckpointFolder, family: Family, system: str | None) -> Processor:
    """Make the family's processor; it needs the `hub` extra's tokenizers and jinja2."""
    try:
        if family is NANOVLM:
            from pipeline.processors.nanovlm import NanoVLMProcessor, extra_tokens
            from pipeline.processors.tokens import TextTokenizer

            config = read_config(folder.path)
            extra = extra_tokens(config).values()
            tokenizer = TextTokenizer.load(find_tokenizer(folder), extra)
            return NanoVLMProcessor(config, tokenizer, system=system)
        if family is IDEFICS3:
            from pipeline.processors.idefics3 import Idefics3Processor

            return Idefics3Processor(folder.path, system=system)
        from pipeline.processors.llava import LlavaProcessor

        return LlavaProcessor(folder.path, system=system)
    except ImportError as error:
        raise CheckpointError(
            f"--model {folder.name!r} needs {error.name}; wanted: pip install 'captionjob[hub]'"
        ) from None
