"""Put tower, face networks, heads and concepts together, and write the model's files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from default_model import words
from default_model.backbone import load_tower
from default_model.captions import INSTRUCTIONS, OPENINGS, Vocabulary
from default_model.concepts import Concept, Taxonomy
from default_model.facenets import load_faces
from default_model.fetch import Sources
from default_model.heads import DrawingHeads
from default_model.vocabulary import VOCABULARY_SIZE
from pipeline.models.default import storage
from pipeline.models.default.model import WEIGHTS, DefaultModel
from pipeline.models.default.scene import NUM_CLASSES, SceneReader, SceneSizes
from pipeline.models.language import DecoderSpec

# How the classifier is read; see the card for how these were chosen.
SHARPNESS, COST, LEAST, DRAWING_LEAST, LEAST_FLAT = 1.1, 0.7, 0.5, 0.6, 0.25
DECODER = DecoderSpec(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_size=256,
    intermediate_size=640,
    vocab_size=VOCABULARY_SIZE,
    max_positions=2048,
)
EXACT = frozenset({"scene.drawing_gate.weight"})


@dataclass(frozen=True, slots=True)
class Parts:
    """All that the vision side is put together from."""

    sources: Sources
    taxonomy: Taxonomy
    vocabulary: Vocabulary
    num_drawings: int
    heads: DrawingHeads


def tokenizer_texts(vocabulary: Vocabulary) -> list[str]:
    """Return the texts that the tokenizer is learnt from."""
    photos = [f"a photo of {concept.phrase}" for concept in vocabulary.photo]
    peopled = [vocabulary.caption(r) for r in vocabulary.reports() if r.people][::13]
    drawings = [f"a drawing of {concept.phrase}" for concept in vocabulary.drawing]
    return [*photos, *peopled, *drawings, *OPENINGS * 20, *INSTRUCTIONS * 10]


def assemble(parts: Parts, image_token_id: int) -> DefaultModel:
    """Build the model with its vision side ready and its language model untrained."""
    photo, drawing = parts.vocabulary.photo, parts.vocabulary.drawing
    sizes = SceneSizes(
        num_photo_concepts=len(photo),
        num_photo_members=_members(photo).shape[1],
        num_drawings=parts.num_drawings,
        num_drawing_concepts=len(drawing),
        num_drawing_members=_members(drawing).shape[1],
        sharpness=SHARPNESS,
        drawing_sharpness=parts.heads.sharpness,
        cost=COST,
        least=LEAST,
        drawing_least=DRAWING_LEAST,
        least_flat=LEAST_FLAT,
    )
    model = DefaultModel(sizes, DECODER, image_token_id)
    _fill_scene(model.scene, parts)
    return model


@torch.no_grad()
def _fill_scene(scene: SceneReader, parts: Parts) -> None:
    heads, taxonomy, photo = parts.heads, parts.taxonomy, parts.vocabulary.photo
    scene.tower.load_state_dict(load_tower(parts.sources.python).state_dict())
    scene.faces.load_state_dict(load_faces(parts.sources.python).state_dict())
    scene.drawing_mean.copy_(heads.mean)
    scene.drawing_scale.copy_(heads.scale)
    scene.drawing_basis.weight.copy_(heads.basis.T)
    scene.drawing_head.weight.copy_(heads.means)
    scene.drawing_gate.weight.copy_(heads.gate_weight)
    scene.drawing_gate.bias.copy_(heads.gate_bias)
    for chooser, concepts in (
        (scene.photo_concepts, photo),
        (scene.drawing_concepts, parts.vocabulary.drawing),
    ):
        chooser.members.copy_(_members(concepts))
        chooser.worth.copy_(torch.tensor([concept.worth for concept in concepts]))
    scene.is_animal.copy_(_marked(taxonomy.members(("animal",)), NUM_CLASSES))
    scene.is_face_like.copy_(_marked(taxonomy.members(words.FACE_LIKE), NUM_CLASSES))
    scene.is_drawn.copy_(_marked(taxonomy.members(("comic book",)), NUM_CLASSES))
    for flags, members in ((scene.is_large, words.LARGE), (scene.is_person, ("person",))):
        classes = taxonomy.members(members)
        inside = {i for i, concept in enumerate(photo) if concept.classes <= classes}
        flags.copy_(_marked(frozenset(inside), len(photo)))


def _members(concepts: list[Concept]) -> Tensor:
    pairs = [(i, member) for i, concept in enumerate(concepts) for member in concept.classes]
    return torch.tensor(sorted(pairs), dtype=torch.int16).T


def _marked(indices: frozenset[int], size: int) -> Tensor:
    marks = torch.zeros(size)
    marks[sorted(indices)] = 1
    return marks


def write_model(model: DefaultModel, folder: Path) -> None:
    """Write `weights.safetensors`."""
    facts = {
        "scene": dataclasses.asdict(model.scene.sizes),
        "decoder": dataclasses.asdict(model.spec),
        "image_token_id": model.image_token_id,
    }
    storage.write(folder / WEIGHTS, storage.pack(model.state_dict(), EXACT), facts)
