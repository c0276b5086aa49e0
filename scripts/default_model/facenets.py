"""The face networks as `facenet-pytorch` stores them, made into ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.models.default.faces import FaceFinder

# Their names of the layers that ours name otherwise, for each network; landmarks are left out.
RENAMED = {
    "proposals": ("pnet.pt", {"conv4_1": "score", "conv4_2": "shift"}),
    "refine": (
        "rnet.pt",
        {"dense4": "dense", "prelu4": "prelu_dense", "dense5_1": "score", "dense5_2": "shift"},
    ),
    "output": (
        "onet.pt",
        {"dense5": "dense", "prelu5": "prelu_dense", "dense6_1": "score", "dense6_2": "shift"},
    ),
}


def load_faces(site_packages: Path) -> FaceFinder:
    """Load the three networks from the installed `facenet-pytorch` package."""
    weights: dict[str, Tensor] = {}
    for ours, (file, names) in RENAMED.items():
        path = site_packages / "facenet_pytorch" / "data" / file
        stored = torch.load(path, map_location="cpu", weights_only=True)
        for name, tensor in stored.items():
            layer, kind = name.rsplit(".", 1)
            if layer != "dense6_3":
                weights[f"{ours}.{names.get(layer, layer)}.{kind}"] = tensor
    finder = FaceFinder()
    finder.load_state_dict(weights)
    return finder.eval()
