"""torch's flash attention on CPU: float64, float32, bfloat16, float16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uspft.kernels.blocks import Block
from uspft.kernels.kernel import Gradient, Part

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpu:
    """Block by block through aten's CPU flash op; grouped queries natively, no copies of q, k, v.

    The op divides by zero on an empty block; blocks are never empty.
    """

    name = "torch flash (CPU)"

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], blocks: Sequence[Block], scale: float
    ) -> list[Part]:
        parts = []
        for block in blocks:
            q, k, v = _cut(qkv, block)
            out, lse = _FORWARD(q, k, v, 0.0, block.causal, scale=scale)
            parts.append(Part(block.q0, block.q1, out[0].transpose(0, 1), lse[0]))
        return parts

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[Block],
        scale: float,
    ) -> tuple[list[Gradient], list[Gradient]]:
        out, lse, dout = saved
        queries, keys = [], []
        for block in blocks:
            q, k, v = _cut(qkv, block)
            rows = slice(block.q0, block.q1)
            dq, dk, dv = _BACKWARD(
                _bhtd(dout[rows]),
                q,
                k,
                v,
                _bhtd(out[rows]),
                lse[None, :, rows],
                0.0,
                block.causal,
                scale=scale,
            )
            queries.append(Gradient(block.q0, block.q1, (_thd(dq),)))
            keys.append(Gradient(block.k0, block.k1, (_thd(dk), _thd(dv))))
        return queries, keys


def _cut(qkv: tuple[Tensor, Tensor, Tensor], block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    keys = slice(block.k0, block.k1)
    return _bhtd(q[block.q0 : block.q1]), _bhtd(k[keys]), _bhtd(v[keys])


def _bhtd(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _thd(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
