"""torch's flash attention on CPU, for float64, float32, bfloat16 and float16.

Shapes: n rows (queries) and m keys of a block, h/g query/KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from uspft.blocks import Block, Mask
from uspft.kernels.kernel import BlockGradients, BlockOutput, Gradient, KernelSaved, Qkv
from uspft.kernels.merge import Partial

TILE = 256
"""Rows of the smallest triangles that causal blocks are cut into: the op computes a triangle's last
keys whole, seen or not."""
JOINED_ROWS = 1024
"""Rows of the largest triangle that is cut in the forward pass; in longer ones, merging the parts
costs more than the cut saves."""
STRIP = 480
"""The approximate maximum of keys per call in the backward pass. By default the op uses 512: with a
power of two, rows of scores evict one another from a core's cache."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpu:
    """Attention block by block through aten's CPU flash op, which takes grouped queries natively,
    without copies of q, k and v.

    The op divides by zero on an empty block; blocks are never empty. In dtypes that rounding
    between tiles does not hurt, blocks are cut into tiles that suit the op.
    """

    name = "torch"
    softcap: float | None = None

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        parts = []
        for block in blocks:
            q, k, v = (_turned(x, block) for x in _cut(qkv, block))
            out, lse = _forward(q, k, v, block.mask is not Mask.FULL, scale)
            lse = lse.flip(1) if block.mask is Mask.FLIPPED else lse
            parts.append(BlockOutput(block.q0, block.q1, _turned(out, block), lse))
        return parts

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        queries, keys = [], []
        for block in blocks:
            rows = slice(block.q0, block.q1)
            q, k, v = (_turned(x, block) for x in _cut(qkv, block))
            out, dout = (_turned(x[rows], block) for x in (saved[0], saved[2]))
            lse = saved[1][:, rows]
            lse = lse.flip(1) if block.mask is Mask.FLIPPED else lse
            grads = _backward((q, k, v), (out, lse, dout), block.mask is not Mask.FULL, scale)
            dq, dk, dv = (_turned(grad, block) for grad in grads)
            queries.append(Gradient(block.q0, block.q1, (dq,)))
            keys.append(Gradient(block.k0, block.k1, (dk, dv)))
        return queries, keys


def _cut(qkv: Qkv, block: Block) -> Qkv:
    q, k, v = qkv
    keys = slice(block.k0, block.k1)
    return q[block.q0 : block.q1], k[keys], v[keys]


def _turned(x: Tensor, block: Block) -> Tensor:
    """Return x [n, heads, D], reversed for a flipped block, which makes the block causal."""
    return x.flip(0) if block.mask is Mask.FLIPPED else x


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out [n, h, D], lse [h, n]); a short triangle is computed as two smaller ones and the
    rectangle between them."""
    n = len(q)
    if not (causal and TILE < n <= JOINED_ROWS and _is_exact(q)):
        out, lse = _FORWARD(*map(_to_kernel, (q, k, v)), 0.0, causal, scale=scale)
        return _from_kernel(out), lse[0]
    middle = -(-n // (2 * TILE)) * TILE
    joined = Partial(q)
    halves = ((0, middle), (middle, n))
    joined.add(
        [BlockOutput(a, b, *_forward(q[a:b], k[a:b], v[a:b], True, scale)) for a, b in halves]
    )
    square = _forward(q[middle:], k[:middle], v[:middle], False, scale)
    joined.add([BlockOutput(middle, n, *square)])
    return joined.result()


def _backward(qkv: Qkv, saved: KernelSaved, causal: bool, scale: float) -> Qkv:
    """Return dq [n, h, D], dk and dv [m, g, D], computed strip by strip of keys."""
    (q, k, v), (out, lse, dout) = qkv, saved

    def of(rows: slice, keys: slice, causal: bool) -> list[Tensor]:
        given = map(_to_kernel, (dout[rows], q[rows], k[keys], v[keys], out[rows]))
        grads = BACKWARD(*given, lse[None, :, rows], 0.0, causal, scale=scale)
        return [_from_kernel(grad) for grad in grads]

    whole = slice(0, len(q)), slice(0, len(k)), causal
    calls = list(strips(*whole)) if _is_exact(q) else [whole]
    if len(calls) == 1:
        dq, dk, dv = of(*calls[0])
        return dq, dk, dv
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in qkv)
    for rows, keys, triangle in calls:
        parts = of(rows, keys, triangle)
        for total, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            total[where] += part
    return dq, dk, dv


def strips(rows: slice, keys: slice, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Yield (rows, keys, causal) of each call: one for each strip of keys, and in a triangle, for
    each strip, those of its small triangle and one for the rows below."""
    width = even(keys.stop - keys.start, STRIP)
    for start in range(keys.start, keys.stop, width):
        strip = slice(start, min(start + width, keys.stop))
        if causal:
            yield from _triangles(strip)
        below = slice(strip.stop if causal else rows.start, rows.stop)
        if below.start < below.stop:
            yield below, strip, False


def _triangles(rows: slice) -> Iterator[tuple[slice, slice, bool]]:
    """Yield (rows, keys, causal) of the triangle on `rows`, as small triangles and the rectangle
    below each."""
    width = even(rows.stop - rows.start, TILE)
    for start in range(rows.start, rows.stop, width):
        own = slice(start, min(start + width, rows.stop))
        yield own, own, True
        if own.stop < rows.stop:
            yield slice(own.stop, rows.stop), own, False


def even(length: int, most: int) -> int:
    """Return the width of equal pieces of a length, about `most` at most: a multiple of 16, and no
    power of two."""
    width = -(-length // (16 * -(-length // most))) * 16
    return width + 16 if width & (width - 1) == 0 else width


def _is_exact(x: Tensor) -> bool:
    """Return whether sums of tiles, which are added in the dtype of x, are as good as the op's
    own."""
    return x.dtype in (torch.float32, torch.float64)


def _to_kernel(x: Tensor) -> Tensor:
    """Return x [n, heads, D] as [1, heads, n, D] with a contiguous last dimension, which the op
    takes for granted."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1)[None]


def _from_kernel(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
