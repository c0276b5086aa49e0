"""Fit the drawing head and the photo-or-drawing gate on the tower's pooled features."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from default_model.drawings import GROUPS, Names
from default_model.features import Features
from pipeline.models.default.scene import standardised

# Sets by one artist: a head is calibrated on artists that it was not fitted on.
ARTISTS = {
    "noto": 0,
    "fluent-emoji-flat": 1,
    "fluent-3d": 1,
    "twemoji": 2,
    "emojione": 3,
    "fxemoji": 4,
}
RIDGE, GATE_RIDGE = 300.0, 1.0
SHARPNESSES = (10, 15, 20, 25, 30, 35, 40, 50, 60, 80, 100)
KEPT_ALIKE = 0.06  # of flags and symbols, which are hundreds under one name
# Drawings called photographs are forgiven more easily than photographs called drawings.
GATE_PHOTO_WEIGHT = 4.0


@dataclass(frozen=True, slots=True)
class DrawingHeads:
    """Linear heads over standardised features, and how sharply to read the drawing scores."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
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
    inputs = _with_one(standardised(pooled, mean, scale))
    gate = _fit_gate(inputs, _with_one(standardised(others, mean, scale)))
    kept = _thinned(drawn, names)
    inputs, labels = inputs[kept], labels[kept]
    styles = [style for style, is_kept in zip(drawn.styles, kept.tolist(), strict=True) if is_kept]
    solution = _ridge(inputs, labels, len(singles))
    return DrawingHeads(
        mean=mean,
        scale=scale,
        weight=solution[:-1].T,
        bias=solution[-1],
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


def _ridge(inputs: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    targets = F.one_hot(labels, num_labels).float()
    gram = inputs.T @ inputs + RIDGE * torch.eye(inputs.shape[1])
    return torch.linalg.solve(gram, inputs.T @ targets)


def _calibrated(inputs: Tensor, labels: Tensor, styles: list[str], num_labels: int) -> float:
    """Return the sharpness at which the head is as sure as it is right on unseen artists."""
    artists = torch.tensor([ARTISTS[style] for style in styles])
    scores = torch.zeros(len(inputs), num_labels)
    for artist in artists.unique():
        is_held = artists == artist
        fitted = _ridge(inputs[~is_held], labels[~is_held], num_labels)
        scores[is_held] = inputs[is_held] @ fitted
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
