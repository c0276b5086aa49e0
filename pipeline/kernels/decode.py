"""A decode step's small work in one pass each: attention over the cache, RMSNorm, the choice.

Each of these is a dozen operations of torch, whose starts cost more than their arithmetic at a
few dozen rows, and whose intermediate results go through memory. Every row is computed by
itself: neither neighbours nor threads take part in its numbers.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from pipeline.kernels import library
from pipeline.kernels.library import Library

# Must be what decode.c and rows.h have under these names.
MAX_HEAD_DIM = 256
TOGETHER = 4
# Less than this is done before another thread has woken up.
NUMBERS_OF_THREAD = 4096
# Rows are cut up by heads where there are fewer of them than this for each thread.
ROWS_OF_THREAD = 4


class _Attention(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("parts_of_row", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("num_columns", c_int64),
        ("heads", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("lengths", c_void_p),
        ("mixed", c_void_p),
        ("room", c_void_p),
        ("room_of_thread", c_int64),
        ("next_thread", c_int64),
    )


class _Norm(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("rows_of_piece", c_int64),
        ("eps", c_double),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("normed", c_void_p),
    )


class _Choice(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("logits", c_void_p),
        ("ids", c_void_p),
        ("logprobs", c_void_p),
    )


def can_attend(keys: Tensor) -> Library | None:
    """Return the kernels if they can attend over slots `[..., K, D]`; None if they cannot."""
    head_dim = keys.shape[-1]
    kernels = _kernels_for(keys)
    if kernels is None or head_dim % kernels.lanes or head_dim > MAX_HEAD_DIM or head_dim % 2:
        return None
    return kernels


class StepAttention:
    """Attention of one decode step, layer by layer."""

    def __init__(self, kernels: Library, lengths: Tensor, num_heads: int) -> None:
        """Take the tokens that each slot holds, int64 `[B]`; `num_heads` is H."""
        self._kernels = kernels
        self._lengths = lengths
        self._num_heads = num_heads
        self._room = torch.empty(0)

    def attend(
        self, heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Put a layer's new tokens into the cache and attend over it; returns `[B, 1, H D]`.

        heads `[B, 1, H + 2 K, D]` are queries, keys and values not yet rotated; cos and signed
        sin float32 `[B, 1, 1, D]` (`rope_tables`); keys and values `[N, S, K, D]` the slots.
        """
        batch, _, _, head_dim = heads.shape
        _, num_columns, num_kv_heads, _ = keys.shape
        num_threads = torch.get_num_threads()
        heads = heads.contiguous()
        # Queries and sums of all heads, and their scores with a vector's room behind them.
        scores = num_columns + TOGETHER + self._kernels.lanes
        room_of_thread = self._num_heads * (2 * head_dim + scores)
        if self._room.numel() < num_threads * room_of_thread:
            self._room = torch.empty(num_threads * room_of_thread)
        mixed = torch.empty(batch, 1, self._num_heads * head_dim, dtype=heads.dtype)
        job = _Attention(
            next=0,
            num_rows=batch,
            parts_of_row=1 if batch >= ROWS_OF_THREAD * num_threads else num_kv_heads,
            num_heads=self._num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_columns=num_columns,
            heads=heads.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            lengths=self._lengths.data_ptr(),
            mixed=mixed.data_ptr(),
            room=self._room.data_ptr(),
            room_of_thread=room_of_thread,
            next_thread=0,
        )
        self._kernels.run(self._kernels.attention[heads.dtype], job, num_threads)
        return mixed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Return `x / sqrt(mean(x^2) + eps) * weight` of `[..., C]`; None where torch must do it.

    Computed in float32 and rounded once.
    """
    kernels = _kernels_for(x)
    if kernels is None or weight.dtype != x.dtype or not x.is_contiguous():
        return None
    width = x.shape[-1]
    num_rows = x.numel() // width
    num_threads = min(torch.get_num_threads(), 1 + x.numel() // NUMBERS_OF_THREAD)
    normed = torch.empty_like(x)
    job = _Norm(
        next=0,
        num_rows=num_rows,
        width=width,
        rows_of_piece=max(1, NUMBERS_OF_THREAD // width),
        eps=eps,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        normed=normed.data_ptr(),
    )
    kernels.run(kernels.norm[x.dtype], job, num_threads)
    return normed


def best(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first of the largest logits of each row `[B, V]`, and its log probability.

    ids int64 `[B]`, log probabilities float64 `[B]`, NaN where logits are not finite. None where
    torch must do it.
    """
    kernels = _kernels_for(logits)
    if kernels is None or not logits.is_contiguous():
        return None
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty(num_rows, dtype=torch.float64)
    job = _Choice(
        next=0,
        num_rows=num_rows,
        vocab_size=vocab_size,
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        logprobs=logprobs.data_ptr(),
    )
    num_threads = min(torch.get_num_threads(), 1 + logits.numel() // NUMBERS_OF_THREAD)
    kernels.run(kernels.choice[logits.dtype], job, num_threads)
    return ids, logprobs


def _kernels_for(tensor: Tensor) -> Library | None:
    kernels = library.found()
    is_here = tensor.device.type == "cpu" and not tensor.requires_grad
    return kernels if kernels and is_here and tensor.dtype in kernels.norm else None
