"""Checkpoints that `transformers` loads, found and checked before their weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipeline.backends.placement import Placement
from pipeline.backends.transformers import Network, TransformersCaptioner
from pipeline.captioner import SamplingSettings, SpeedSettings
from pipeline.checkpoints import CheckpointFolder
from pipeline.errors import CheckpointError
from pipeline.models.stored import WeightFiles, weights_sha256
from pipeline.processors.foreign import ForeignProcessor


@dataclass(frozen=True, slots=True)
class TransformersSource:
    """A checkpoint that the library knows, its weights not yet loaded."""

    folder: CheckpointFolder
    placement: Placement
    processor: ForeignProcessor
    weights_sha256: str
    trust_remote_code: bool = False
    family: str = field(default="transformers", init=False)
    backend: str = field(default="transformers", init=False)

    @property
    def default_prompt(self) -> str:
        """The prompt used where the user gives none."""
        return self.processor.default_prompt

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What identifies the model in `_job.json`."""
        import transformers

        return {
            "model": self.folder.name,
            "family": self.family,
            "backend": self.backend,
            "transformers": transformers.__version__,
            "weights_sha256": self.weights_sha256,
            "dtype": self.placement.dtype_name,
        }

    def load(self, sampling: SamplingSettings, speed: SpeedSettings) -> TransformersCaptioner:
        """Load the weights onto the device."""
        if speed.threads:
            torch.set_num_threads(speed.threads)
        return TransformersCaptioner(self._model(), self.processor, sampling, speed)

    def _model(self) -> Network:
        from transformers import AutoModelForImageTextToText

        try:
            model, facts = AutoModelForImageTextToText.from_pretrained(
                self.folder.path,
                dtype=self.placement.dtype,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (ValueError, OSError, ImportError, RuntimeError, KeyError) as error:
            raise CheckpointError(_refusal(self.folder, error)) from None
        missing = sorted(facts["missing_keys"])
        if missing:  # the library would fill them at random
            raise CheckpointError(f"{self.folder.path}: no tensor {missing[0]}, which it needs")
        return model.to(self.placement.device).eval()


def transformers_source(
    folder: CheckpointFolder,
    placement: Placement,
    *,
    system: str | None = None,
    trust_remote_code: bool = False,
) -> TransformersSource:
    """Return the source of a checkpoint that the library loads; CheckpointError where it cannot."""
    try:
        from transformers import AutoConfig, AutoProcessor
    except ImportError:
        raise CheckpointError(
            f"--model {folder.name!r} needs transformers; "
            "wanted: pip install 'captionjob[transformers]'"
        ) from None
    WeightFiles.find(folder.path)  # reads the headers: a cut file is told here, in one line
    checksum = weights_sha256(folder.path)
    try:
        AutoConfig.from_pretrained(folder.path, trust_remote_code=trust_remote_code)
        processor = AutoProcessor.from_pretrained(folder.path, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_refusal(folder, error)) from None
    if getattr(processor, "tokenizer", None) is None:
        raise CheckpointError(f"--model {folder.name!r}: transformers finds no tokenizer in it")
    foreign = ForeignProcessor(processor, system=system)
    return TransformersSource(folder, placement, foreign, checksum, trust_remote_code)


def _refusal(folder: CheckpointFolder, error: BaseException) -> str:
    import transformers

    said = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    if "trust_remote_code" in str(error):
        said = "it brings code of its own, which runs only with --trust-remote-code"
    return f"--model {folder.name!r}: transformers {transformers.__version__} refuses it: {said}"
