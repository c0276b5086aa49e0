"""From class probabilities to the one concept that a caption names.

A concept is true of some classes; saying it is worth 1 for a class of its own, less for a group
the more that leaves open, and a wrong one costs. The concept of the highest expected worth is
said, or none ("something unclear") where even the best would be too much of a gamble.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNCLEAR = -1


class ConceptChooser(nn.Module):
    """Chooses among N concepts of C classes; the first C concepts are the classes themselves."""

    members: Tensor  # [2, M], int16: a concept, and a class that it is true of
    worth: Tensor  # [N]

    def __init__(
        self, num_concepts: int, num_members: int, sharpness: float, cost: float, least: float
    ) -> None:
        super().__init__()
        self.register_buffer("members", torch.zeros(2, num_members, dtype=torch.int16))
        self.register_buffer("worth", torch.zeros(num_concepts))
        self.sharpness, self.cost, self.least = sharpness, cost, least

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return how likely each concept is true, `[B, N]`, from class logits `[B, C]`."""
        classes = (logits * self.sharpness).softmax(dim=-1)
        concept, member = self.members.long()
        chances = classes.new_zeros(len(classes), len(self.worth))
        return chances.index_add_(1, concept, classes[:, member])

    def choose(self, chances: Tensor) -> Tensor:
        """Return the index of the concept to say for `[B, N]`, or `UNCLEAR`: `[B]`."""
        expected = chances * (self.worth + self.cost) - self.cost
        expected = expected.masked_fill(chances < self.least, float("-inf"))
        best, chosen = expected.max(dim=-1)
        return chosen.masked_fill(best <= 0, UNCLEAR)
