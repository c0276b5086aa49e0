"""Fit the drawing head and the photo-or-drawing gate on the tower's pooled features."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from default_model.drawings import GROUPS, Names
from default_model.features import Features
from pipeline.models.default.scene import DRAWING_WIDTH, standardised

# Sets by one artist: a head is calibrated on artists that it was not fitted on.
ARTISTS = {
    "noto": 0,
    "fluent-emoji-flat": 1,
    "fluent-3d": 1,
    "twemoji": 2,
    "emojione": 3,
    "fxemoji": 4,
}
SHRINKAGE, GATE_RIDGE = 0.3, 1.0
SHARPNESSES = (4, 6, 8, 10, 12, 15, 18, 22, 26, 30, 40)
KEPT_ALIKE = 0.06  # of flags and symbols, which are hundreds under one name
# Drawings called photographs are forgiven more easily than photographs called drawings.
GATE_PHOTO_WEIGHT = 4.0


@dataclass(frozen=True, slots=True)
class DrawingHeads:
    """Heads over standardised features, and how sharply to read the drawing scores (cosines)."""

    mean: Tensor
    scale: Tensor
    basis: Tensor
    means: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    sharpness: float


def fit_heads(features: dict[str, Features], names: Names) -> DrawingHeads:
    """Fit both heads; the drawing head tells the single drawings apart, in their order."""
    drawn = features["drawings"]
    others = torch.cat((features["photos"].pooled, features["meaningless"].pooled)).float()
    pooled = drawn.pooled.float()
    everything = torch.cat((pooled, others))
    mean, scale = everything.mean(dim=0), 1 / (everything.std(dim=0) + 0.05)
    singles = [concept.phrase for concept in names.concepts[: names.num_singles]]
    labels = torch.tensor([singles.index(names.by_slug[key]) for key in drawn.keys])
    inputs = standardised(pooled, mean, scale)
    gate = _fit_gate(_with_one(inputs), _with_one(standardised(others, mean, scale)))
    kept = _thinned(drawn, names)
    inputs, labels = inputs[kept], labels[kept]
    styles = [style for style, is_kept in zip(drawn.styles, kept.tolist(), strict=True) if is_kept]
    basis, means = _whitened_means(inputs, labels, len(singles))
    return DrawingHeads(
        mean=mean,
        scale=scale,
        basis=basis,
        means=means,
        gate_weight=gate[None, :-1],
        gate_bias=gate[-1:],
        sharpness=_calibrated(inputs, labels, styles, len(singles)),
    )


def _thinned(drawn: Features, names: Names) -> Tensor:
    """Return which drawings to keep: all, but of flags and symbols only a few."""
    chance = random.Random(0)
    return torch.tensor(
        [
            names.by_slug[key] not in (GROUPS["flags"], GROUPS["symbols"])
            or chance.random() < KEPT_ALIKE
            for key in drawn.keys
        ]
    )


def _with_one(inputs: Tensor) -> Tensor:
    return torch.cat((inputs, torch.ones(len(inputs), 1)), dim=1)


def _whitened_means(inputs: Tensor, labels: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return a basis `[1280, K]` that evens out how artists differ, and unit means `[n, K]`.

    In it the cosine to each drawing's mean tells drawings apart far better than a linear fit, on
    artists that it has not seen (linear discriminant analysis, with cosines for distances).
    """
    counts = torch.bincount(labels, minlength=num_labels).clamp(min=1)
    means = torch.zeros(num_labels, inputs.shape[1]).index_add_(0, labels, inputs)
    means /= counts[:, None]
    spread = inputs - means[labels]
    within = spread.T @ spread / len(inputs)
    within += SHRINKAGE * within.diagonal().mean() * torch.eye(len(within))
    whitening = torch.linalg.cholesky(torch.linalg.inv(within))
    _, _, directions = torch.linalg.svd(means @ whitening, full_matrices=False)
    basis = whitening @ directions[:DRAWING_WIDTH].T
    return basis, F.normalize(means @ basis, dim=1)


def _calibrated(inputs: Tensor, labels: Tensor, styles: list[str], num_labels: int) -> float:
    """Return the sharpness at which the head is as sure as it is right on unseen artists."""
    artists = torch.tensor([ARTISTS[style] for style in styles])
    scores = torch.zeros(len(inputs), num_labels)
    for artist in artists.unique():
        is_held = artists == artist
        basis, means = _whitened_means(inputs[~is_held], labels[~is_held], num_labels)
        scores[is_held] = F.normalize(inputs[is_held] @ basis, dim=1) @ means.T
    accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
    sureness = {
        sharpness: (scores * sharpness).softmax(dim=1).amax(dim=1).mean().item()
        for sharpness in SHARPNESSES
    }
    best = min(sureness, key=lambda sharpness: abs(sureness[sharpness] - accuracy))
    print(f"drawings of unseen artists: {accuracy:.3f} right, sure {sureness[best]:.3f} at {best}")
    return float(best)


def _fit_gate(drawn: Tensor, others: Tensor) -> Tensor:
    """Fit a logistic regression that is positive for drawings; returns `[1281]`."""
    inputs = torch.cat((drawn, others))
    targets = torch.cat((torch.ones(len(drawn)), torch.zeros(len(others))))
    balance = len(drawn) / len(others)
    weights = torch.where(targets == 1, 1.0, balance * GATE_PHOTO_WEIGHT)
    gate = torch.zeros(inputs.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([gate], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        errors = F.binary_cross_entropy_with_logits(inputs @ gate, targets, weights)
        total = errors + GATE_RIDGE / len(inputs) * gate[:-1].square().sum()
        total.backward()
        return total

    optimiser.step(loss)
    return gate.detach()
