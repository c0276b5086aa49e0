"""Attention of whole sequences in bfloat16, on matrix tiles (AMX): the vision tower's.

A head's scores and weights never leave the core's own cache, queries, keys and values are read
where the tower's product left them, and the result is written as its next product wants it.

Scores, sums and the softmax are float32; weights are rounded to bfloat16 for their product with
the values and for their sum alike; the result is rounded once. Each token's numbers come from its
own image alone, in an order that neither the batch nor the number of threads changes.
"""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from pipeline.kernels.library import Part, part_of_tiles, run

# Must be what attention.c has under these names; the entry's number grows with every change.
_ENTRY = "captionjob_whole_attention_1"
MAX_HEAD_DIM = 79
GROUP = 32
QUERIES = 16
TILE_BYTES = 1024
VALUE_TILES = 5
WIDTH_OF_TILE = 32
# A head is cut up where there are fewer than this for each thread: some threads would end early.
HEADS_OF_THREAD = 4


class _WholeAttention(Structure):
    _fields_ = (
        ("next", c_int64),
        ("num_images", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("parts_of_head", c_int64),
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("image_step", c_int64),
        ("token_step", c_int64),
        ("head_step", c_int64),
        ("mask", c_void_p),
        ("mixed", c_void_p),
        ("room", c_void_p),
        ("room_of_thread", c_int64),
        ("next_thread", c_int64),
    )


@cache
def found() -> Part | None:
    """Return the kernel; None where it was not built, or the processor has no tiles."""
    return part_of_tiles("_attention", _ENTRY)


def attend_to_all(heads: Tensor, mask: Tensor | None) -> Tensor | None:
    """Attend from every token to all that may be seen; returns `[I, P, H D]`.

    heads `[I, P, 3, H, D]` are queries, keys and values; mask is bool `[I, 1, 1, P]`, True where a
    token may be seen, and hides no whole image. None where torch must do it.
    """
    part = found()
    num_images, num_tokens, _, num_heads, head_dim = heads.shape
    if (
        part is None
        or heads.device.type != "cpu"
        or heads.dtype != torch.bfloat16
        or heads.requires_grad
        or heads.stride(-1) != 1
        or head_dim > MAX_HEAD_DIM
    ):
        return None
    queries, keys, values = heads.unbind(2)
    seen = None if mask is None else mask.expand(num_images, 1, 1, num_tokens).contiguous()
    num_threads = torch.get_num_threads()
    room_of_thread = _room(num_tokens, head_dim)
    # What the tiles lie in begins at a multiple of 64.
    room = torch.empty(num_threads * room_of_thread + 64, dtype=torch.uint8)
    mixed = heads.new_empty(num_images, num_tokens, num_heads * head_dim)
    num_heads_of_all = max(1, num_images * num_heads)
    job = _WholeAttention(
        next=0,
        num_images=num_images,
        num_tokens=num_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        parts_of_head=-(-HEADS_OF_THREAD * num_threads // num_heads_of_all),
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        image_step=heads.stride(0),
        token_step=heads.stride(1),
        head_step=heads.stride(3),
        mask=None if seen is None else seen.data_ptr(),
        mixed=mixed.data_ptr(),
        room=-(-room.data_ptr() // 64) * 64,
        room_of_thread=room_of_thread,
        next_thread=0,
    )
    run(part, job, num_threads)
    return mixed


def _room(num_tokens: int, head_dim: int) -> int:
    """Return the bytes that a thread works in: the sizes of `struct room`."""
    num_groups = -(-num_tokens // GROUP)
    key_tiles = 2 if head_dim <= 2 * WIDTH_OF_TILE else 3
    group = (2 * key_tiles + VALUE_TILES) * TILE_BYTES + 4 * GROUP * QUERIES
    return num_groups * group + (3 + 2 + VALUE_TILES) * TILE_BYTES
