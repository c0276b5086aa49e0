"""The default model behind the engine's seam: three image tokens, then a small language model.

picture ─► SceneReader ─► style, people, concept ─► three rows of tables ─► LlamaDecoder
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.default import storage
from pipeline.models.default.scene import People, SceneReader, SceneSizes, Style
from pipeline.models.language import DecoderSpec, LlamaDecoder
from pipeline.models.vlm import VisionLanguageModel
from pipeline.records import ImageInputs

FOLDER = Path(__file__).resolve().parent
WEIGHTS = "weights.safetensors"
WEIGHTS_PATH = FOLDER / WEIGHTS
VISION_BATCH = 4  # pictures at a time: more are no faster, and take more memory


class DefaultModel(VisionLanguageModel):
    """The scene reader's three numbers as image tokens of a llama-type decoder."""

    num_image_tokens = 3

    def __init__(self, sizes: SceneSizes, spec: DecoderSpec, image_token_id: int) -> None:
        super().__init__(LlamaDecoder(spec), image_token_id)
        self.scene = SceneReader(sizes)
        num_concepts = sizes.num_photo_concepts + sizes.num_drawing_concepts + 2
        self.style_tokens = nn.Embedding(len(Style), spec.hidden_size)
        self.people_tokens = nn.Embedding(len(People), spec.hidden_size)
        self.concept_tokens = nn.Embedding(num_concepts, spec.hidden_size)

    def image_tokens(self, reports: Tensor) -> Tensor:
        """Turn reports `[B, 3]` into image tokens `[B, 3, C]`."""
        styles, people, concepts = reports.unbind(dim=1)
        tables = (
            self.style_tokens(styles),
            self.people_tokens(people),
            self.concept_tokens(concepts),
        )
        return torch.stack(tables, dim=1)

    @torch.inference_mode()
    def reports(self, images: Sequence[ImageInputs]) -> Tensor:
        """Return style, people and concept of each picture: `[B, 3]`."""
        device = self.style_tokens.weight.device
        reports = [
            self.scene(torch.stack([image.pixels for image in images[start:stop]]).to(device))
            for start in range(0, len(images), VISION_BATCH)
            for stop in (start + VISION_BATCH,)
        ]
        return torch.cat(reports)

    def encode_images(self, images: Sequence[ImageInputs]) -> list[Tensor]:
        """Return each picture's image tokens `[3, C]`."""
        return list(self.image_tokens(self.reports(images)).detach().unbind(dim=0))


def build(facts: dict[str, Any]) -> DefaultModel:
    """Build the network that a weights file's facts describe, its weights not yet set."""
    return DefaultModel(
        SceneSizes(**facts["scene"]), DecoderSpec(**facts["decoder"]), facts["image_token_id"]
    )


def load_default(dtype: torch.dtype = torch.float32, folder: Path = FOLDER) -> DefaultModel:
    """Load the model that the package carries, in evaluation mode.

    The vision side stays in float32: what it reports must not depend on how text is computed.
    """
    packed, facts = storage.read(folder / WEIGHTS)
    # Not on the meta device: what it imports takes longer than to fill 10 million numbers.
    model = build(facts)
    model.load_state_dict(storage.unpack(packed), assign=True)
    for parameter in model.scene.tower.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    model.decoder.to(dtype)
    for table in (model.style_tokens, model.people_tokens, model.concept_tokens):
        table.to(dtype)
    return model.requires_grad_(False).eval()
