"""EfficientNet-Lite2 in plain torch, its batch norms folded into the convolutions.

The network is Google's EfficientNet-Lite (https://arxiv.org/abs/1905.11946, without squeeze and
excitation, ReLU6 throughout). An input of `32 k + 1` pixels makes every stride-2 convolution see
an odd size, where TensorFlow's "SAME" padding, which the weights were trained with, is symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

INPUT_SIZE = 257  # 32 * 8 + 1; the weights were trained at 260
NUM_CLASSES = 1000
HEAD_WIDTH = 1280


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of one width: how many, their kernel, the first one's stride, the expansion."""

    num_blocks: int
    width: int
    kernel: int
    stride: int
    expansion: int


# Lite2: width 1.1 (rounded to eights) and depth 1.2 of Lite0, whose first and last stages are kept.
STAGES = (
    Stage(1, 16, 3, 1, 1),
    Stage(3, 24, 3, 2, 6),
    Stage(3, 48, 5, 2, 6),
    Stage(4, 88, 3, 2, 6),
    Stage(4, 120, 5, 1, 6),
    Stage(5, 208, 5, 2, 6),
    Stage(1, 352, 3, 1, 6),
)
STEM_WIDTH = 32


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups)


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; added to the input where shapes allow."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        self.is_residual = stride == 1 and inputs == stage.width
        self.expand = _conv(inputs, hidden, 1) if stage.expansion != 1 else None
        self.depthwise = _conv(hidden, hidden, stage.kernel, stride, hidden)
        self.project = _conv(hidden, stage.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run `[B, C, H, W]`; returns `[B, C', H / stride, W / stride]`."""
        hidden = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        hidden = F.relu6(self.depthwise(hidden), inplace=True)
        out: Tensor = self.project(hidden)
        return out.add_(x) if self.is_residual else out


class Tower(nn.Module):
    """The image classifier: what it pools is also what the drawing head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, STEM_WIDTH, 3, 2)
        blocks, width = [], STEM_WIDTH
        for stage in STAGES:
            for index in range(stage.num_blocks):
                blocks.append(InvertedResidual(width, stage, stage.stride if index == 0 else 1))
                width = stage.width
        self.blocks = nn.ModuleList(blocks)
        self.head = _conv(width, HEAD_WIDTH, 1)
        self.classifier = nn.Linear(HEAD_WIDTH, NUM_CLASSES)

    def features(self, pixels: Tensor) -> Tensor:
        """Turn scaled pixels `[B, 3, H, W]` into features `[B, 1280, H / 32, W / 32]`."""
        x = F.relu6(self.stem(pixels))
        for block in self.blocks:
            x = block(x)
        return F.relu6(self.head(x))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return pooled features `[B, 1280]` and class logits `[B, 1000]`."""
        pooled = self.features(pixels).mean(dim=(2, 3))
        return pooled, self.classifier(pooled)


def scale_pixels(pixels: Tensor) -> Tensor:
    """Bring uint8 pixels to the range that the tower was trained on (not ImageNet's)."""
    return (pixels.float() - 127.0) / 128.0
