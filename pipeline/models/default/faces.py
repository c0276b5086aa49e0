"""Find faces with the three small networks of MTCNN (https://arxiv.org/abs/1604.02878).

    proposals   a fully convolutional net over a pyramid of shrunk pictures: windows of 12 pixels
    refine      each window again at 24 pixels
    output      what is left again at 48 pixels, by far the most careful of the three

Thresholds are stricter than usual, and `scene.py` asks for more before it claims a person: one who
is not there is worse than one left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_FACE = 20  # pixels of the tile; smaller faces are not looked for
PYRAMID_FACTOR = 0.709  # each level has half the area of the one before
WINDOW, STRIDE = 12, 2
PROPOSAL_LEAST, REFINE_LEAST, OUTPUT_LEAST = 0.7, 0.8, 0.9
MAX_WINDOWS, MAX_PROPOSALS, MAX_REFINED = 192, 48, 16


@dataclass(frozen=True, slots=True)
class Faces:
    """The faces of one tile: boxes `[K, 4]` (left, top, right, bottom) and how sure, `[K]`."""

    boxes: Tensor
    scores: Tensor


class ProposalNet(nn.Module):
    """Scores every window of 12 pixels, two pixels apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.conv3, self.prelu3 = nn.Conv2d(16, 32, 3), nn.PReLU(32)
        self.score = nn.Conv2d(32, 2, 1)
        self.shift = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores `[B, h, w]` and box shifts `[B, 4, h, w]` for `[B, 3, H, W]`."""
        x = F.max_pool2d(self.prelu1(self.conv1(x)), 2, 2, ceil_mode=True)
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return self.score(x).softmax(dim=1)[:, 1], self.shift(x)


class WindowNet(nn.Module):
    """Scores and shifts windows of one size: the second network (24), and the third (48)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.is_output = size == 48
        first, second, hidden, flat = (32, 64, 256, 1152) if self.is_output else (28, 48, 128, 576)
        self.conv1, self.prelu1 = nn.Conv2d(3, first, 3), nn.PReLU(first)
        self.conv2, self.prelu2 = nn.Conv2d(first, second, 3), nn.PReLU(second)
        kernel = 3 if self.is_output else 2
        self.conv3, self.prelu3 = nn.Conv2d(second, 64, kernel), nn.PReLU(64)
        if self.is_output:
            self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense, self.prelu_dense = nn.Linear(flat, hidden), nn.PReLU(hidden)
        self.score = nn.Linear(hidden, 2)
        self.shift = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores `[K]` and box shifts `[K, 4]` for windows `[K, 3, size, size]`."""
        x = F.max_pool2d(self.prelu1(self.conv1(x)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = self.prelu3(self.conv3(x))
        if self.is_output:
            x = self.prelu4(self.conv4(F.max_pool2d(x, 2, 2, ceil_mode=True)))
        # The weights were stored by a library that orders width before height.
        hidden = self.prelu_dense(self.dense(x.permute(0, 3, 2, 1).flatten(1)))
        return self.score(hidden).softmax(dim=1)[:, 1], self.shift(hidden)


class FaceFinder(nn.Module):
    """The cascade; only proposals are batched, so a tile's faces are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proposals = ProposalNet()
        self.refine = WindowNet(24)
        self.output = WindowNet(48)

    def forward(self, tiles: Tensor) -> list[Faces]:
        """Find the faces of each of the uint8 tiles `[B, 3, S, S]`."""
        if not len(tiles):
            return []
        scaled = (tiles.to(self.output.score.weight.dtype) - 127.5) / 128.0
        found = self._propose(scaled)
        return [self._confirm(tile, *one) for tile, one in zip(scaled, found, strict=True)]

    def _propose(self, tiles: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tile's windows `[K, 4]` and their scores `[K]`."""
        size = tiles.shape[-1]
        levels: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(len(tiles))]
        scale = WINDOW / LEAST_FACE
        while size * scale >= WINDOW:
            side = int(size * scale + 1)
            shrunk = F.interpolate(tiles, size=(side, side), mode="area")
            scores, shifts = self.proposals(shrunk)
            for row, (score, shift) in enumerate(zip(scores, shifts, strict=True)):
                levels[row].append(_windows(score, shift, scale))
            scale *= PYRAMID_FACTOR
        return [_strongest(level, MAX_PROPOSALS) for level in levels]

    def _confirm(self, tile: Tensor, boxes: Tensor, scores: Tensor) -> Faces:
        for net, least, most, is_last in (
            (self.refine, REFINE_LEAST, MAX_REFINED, False),
            (self.output, OUTPUT_LEAST, MAX_REFINED, True),
        ):
            if not len(boxes):
                break
            boxes = _squared(boxes)
            scores, shifts = net(_cut(tile, boxes, net.size))
            is_kept = scores > least
            boxes, scores = _shifted(boxes[is_kept], shifts[is_kept]), scores[is_kept]
            kept = suppress(boxes, scores, 0.7, is_by_smaller=is_last)[:most]
            boxes, scores = boxes[kept], scores[kept]
        return Faces(boxes, scores)


def _windows(score: Tensor, shift: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Turn a level's score map into boxes of the tile, the best of each neighbourhood."""
    rows, columns = (score > PROPOSAL_LEAST).nonzero(as_tuple=True)
    # Patterns can have thousands; the clash table of `suppress` grows with their square.
    best = score[rows, columns].argsort(descending=True, stable=True)[:MAX_WINDOWS]
    rows, columns = rows[best], columns[best]
    scores = score[rows, columns]
    first = torch.stack((columns, rows), dim=1).to(score.dtype) * STRIDE
    boxes = torch.cat((((first + 1) / scale).floor(), ((first + WINDOW) / scale).floor()), dim=1)
    kept = suppress(boxes, scores, 0.5)
    shifts = shift[:, rows, columns].T
    widths = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    return (boxes + shifts * widths)[kept], scores[kept]


def _strongest(levels: list[tuple[Tensor, Tensor]], most: int) -> tuple[Tensor, Tensor]:
    boxes = torch.cat([boxes for boxes, _ in levels])
    scores = torch.cat([scores for _, scores in levels])
    kept = suppress(boxes, scores, 0.7)[:most]
    return boxes[kept], scores[kept]


def _squared(boxes: Tensor) -> Tensor:
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    halves = (boxes[:, 2:] - boxes[:, :2]).amax(dim=1, keepdim=True) / 2
    return torch.cat((centres - halves, centres + halves), dim=1)


def _shifted(boxes: Tensor, shifts: Tensor) -> Tensor:
    return boxes + shifts * (boxes[:, 2:] - boxes[:, :2] + 1).repeat(1, 2)


def _cut(tile: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Cut boxes `[K, 4]` out of `[3, S, S]` at `size` pixels: `[K, 3, size, size]`.

    Sampled at twice the size and averaged, so that large boxes do not alias.
    """
    steps = (torch.arange(2 * size, dtype=tile.dtype, device=tile.device) + 0.5) / (2 * size)
    across = boxes[:, None, 0] + steps * (boxes[:, 2] - boxes[:, 0])[:, None]
    down = boxes[:, None, 1] + steps * (boxes[:, 3] - boxes[:, 1])[:, None]
    grid = torch.stack(
        (
            across[:, None, :].expand(-1, 2 * size, -1),
            down[:, :, None].expand(-1, -1, 2 * size),
        ),
        dim=-1,
    )
    grid = grid.flatten(0, 1)[None] * (2 / tile.shape[-1]) - 1
    sampled = F.grid_sample(tile[None], grid, padding_mode="border", align_corners=False)[0]
    windows = sampled.view(3, len(boxes), 2 * size, 2 * size).transpose(0, 1)
    return F.avg_pool2d(windows, 2)


def suppress(
    boxes: Tensor, scores: Tensor, most_overlap: float, *, is_by_smaller: bool = False
) -> Tensor:
    """Return the indices of the boxes `[K, 4]` to keep, best first, none over another.

    The overlap is taken over the union, or over the smaller box with `is_by_smaller`.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    areas = (boxes[:, 2:] - boxes[:, :2] + 1).clamp(min=0).prod(dim=1)
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low + 1).clamp(min=0).prod(dim=2)
    smaller = torch.minimum(areas[:, None], areas[None])
    whole = smaller if is_by_smaller else areas[:, None] + areas[None] - shared
    clashes = ((shared / whole) > most_overlap).tolist()
    kept: list[int] = []
    for candidate in range(len(boxes)):
        if not any(clashes[earlier][candidate] for earlier in kept):
            kept.append(candidate)
    return order[torch.tensor(kept, dtype=torch.long, device=order.device)]
