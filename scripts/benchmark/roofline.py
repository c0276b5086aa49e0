"""The least time that the arithmetic of a workload can take on this machine.

Work is counted in floating-point operations and in bytes that must be read; peaks are measured in
the same run. A piece of work takes at least as long as the slower of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from scripts.benchmark.clock import now
from scripts.benchmark.shapes import NetworkShape
from scripts.benchmark.workload import Workload

MATRIX, GPU_MATRIX = 2048, 8192
READ_BYTES = 1 << 29
NUM_TRIES = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine can do: operations and bytes a second."""

    flops: float
    bytes_read: float

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> Peaks:
        """Time a large matrix product, and a sum over more memory than any cache holds."""
        side = MATRIX if device.type == "cpu" else GPU_MATRIX
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        memory = torch.ones(READ_BYTES // 4, device=device)
        return cls(
            flops=2 * side**3 / _fastest(lambda: a @ b),
            bytes_read=READ_BYTES / _fastest(memory.sum),
        )


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_TRIES):
        began = now()
        work()
        seconds.append(now() - began)
    return min(seconds)


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes that have to come from memory."""

    flops: float
    bytes_read: float

    def least_seconds(self, peaks: Peaks) -> float:
        """The time that no program can beat."""
        return max(self.flops / peaks.flops, self.bytes_read / peaks.bytes_read)


def vision_work(shape: NetworkShape, num_images: int, dtype: torch.dtype) -> Work:
    """Count the tower and the projector; weights are read once a batch."""
    spec = shape.vision
    width, patches = spec.hidden_size, spec.num_positions
    block = 4 * width**2 + 2 * width * spec.intermediate_size
    weights = spec.num_layers * block + 3 * spec.patch_size**2 * width
    attention = 4 * patches**2 * width * spec.num_layers
    projection = width * shape.shuffle_factor**2 * shape.decoder.hidden_size
    flops = 2 * patches * weights + attention + 2 * shape.num_image_tokens * projection
    return Work(num_images * flops, (weights + projection) * dtype.itemsize)


def prefill_work(shape: NetworkShape, lengths: list[int], dtype: torch.dtype) -> Work:
    """Count the prompts' blocks, causal attention, and one row of logits a prompt."""
    spec = shape.decoder
    weights, head = decoder_weights(shape)
    per_pair = 4 * spec.num_heads * spec.head_dim * spec.num_layers
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    flops = 2 * sum(lengths) * weights + per_pair * pairs + 2 * len(lengths) * head
    return Work(flops, (weights + head) * dtype.itemsize)


def decode_work(shape: NetworkShape, num_rows: int, columns: float, dtype: torch.dtype) -> Work:
    """Count one step of `num_rows` rows that hold `columns` tokens each."""
    spec = shape.decoder
    weights, head = decoder_weights(shape)
    attention = 4 * spec.num_heads * spec.head_dim * spec.num_layers * columns
    cached = num_rows * columns * spec.cache_bytes_per_token(dtype)
    flops = num_rows * (2 * (weights + head) + attention)
    return Work(flops, (weights + head) * dtype.itemsize + cached)


def decoder_weights(shape: NetworkShape) -> tuple[int, int]:
    """Return the numbers in the blocks' matrices, and in the head."""
    spec = shape.decoder
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = spec.hidden_size * spec.head_dim * (heads + spec.num_heads)
    block = attention + 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * block, spec.vocab_size * spec.hidden_size


def least_seconds(workload: Workload, num_slots: int, dtype: torch.dtype, peaks: Peaks) -> float:
    """The roofline of a whole workload: every slot busy at every step, nothing padded.

    The first token of a caption comes from the prefill.
    """
    shape = workload.shape
    lengths = [len(request.prompt_ids) for request in workload.requests]
    rows = min(num_slots, len(workload))
    num_steps = math.ceil((workload.num_tokens - len(workload)) / rows)
    held = zip(lengths, workload.lengths, strict=True)
    columns = sum(n * (prompt + n / 2) for prompt, n in held) / workload.num_tokens
    return (
        vision_work(shape, len(workload), dtype).least_seconds(peaks)
        + prefill_work(shape, lengths, dtype).least_seconds(peaks)
        + num_steps * decode_work(shape, rows, columns, dtype).least_seconds(peaks)
    )
