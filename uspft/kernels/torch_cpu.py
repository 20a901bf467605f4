"""torch's flash attention on CPU: float64, float32, bfloat16, float16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uspft.kernels.blocks import Block, Mask
from uspft.kernels.kernel import Gradient, Part

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpu:
    """Block by block through aten's CPU flash op; grouped queries natively, no copies of q, k, v.

    The op divides by zero on an empty block; blocks are never empty.
    """

    name = "torch"
    softcap: float | None = None

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[Part]:
        parts = []
        for block in blocks:
            q, k, v = (_to_kernel(x, block) for x in _cut(qkv, block))
            out, lse = _FORWARD(q, k, v, 0.0, block.mask is not Mask.FULL, scale=scale)
            lse = lse[0].flip(1) if block.mask is Mask.FLIPPED else lse[0]
            parts.append(Part(block.q0, block.q1, _from_kernel(out, block), lse))
        return parts

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[Block],
        scale: float,
    ) -> tuple[list[Gradient], list[Gradient]]:
        queries, keys = [], []
        for block in blocks:
            rows = slice(block.q0, block.q1)
            q, k, v = (_to_kernel(x, block) for x in _cut(qkv, block))
            out, dout = (_to_kernel(x[rows], block) for x in (saved[0], saved[2]))
            lse = saved[1][None, :, rows]
            lse = lse.flip(2) if block.mask is Mask.FLIPPED else lse
            causal = block.mask is not Mask.FULL
            grads = _BACKWARD(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
            dq, dk, dv = (_from_kernel(grad, block) for grad in grads)
            queries.append(Gradient(block.q0, block.q1, (dq,)))
            keys.append(Gradient(block.k0, block.k1, (dk, dv)))
        return queries, keys


def _cut(qkv: tuple[Tensor, Tensor, Tensor], block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    keys = slice(block.k0, block.k1)
    return q[block.q0 : block.q1], k[keys], v[keys]


def _to_kernel(x: Tensor, block: Block) -> Tensor:
    """[T, h, D] → [1, h, T, D], reversed for a flipped block. The op takes the last dimension to be
    contiguous, and does not ask."""
    x = x.flip(0) if block.mask is Mask.FLIPPED else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1)[None]


def _from_kernel(x: Tensor, block: Block) -> Tensor:
    x = x[0].transpose(0, 1)
    return x.flip(0) if block.mask is Mask.FLIPPED else x
