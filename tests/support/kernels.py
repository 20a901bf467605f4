"""What a kernel computes, beside the written-out formula; and a kernel that is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uspft.kernels import Block, Mask, Partial
from uspft.kernels.kernel import BlockOutput
from uspft.kernels.torch_cpu import TorchCpu

CPU, GPU, FLOAT = torch.device("cpu"), torch.device("cuda"), torch.float32
HEADS = (4, 2, 16)
TILED_SHAPES = ((70, 4), (90, 2), (90, 2), (70, 4))
TILED = (
    Block(0, 33, 0, 33, Mask.CAUSAL),
    Block(33, 70, 34, 71, Mask.CAUSAL),
    Block(0, 40, 71, 90, Mask.FULL),
    Block(34, 37, 0, 34, Mask.FULL),
    Block(40, 66, 0, 26, Mask.FLIPPED),
)
"""Long and short, wide and tall; no query meets a key twice."""


def computed(kernel: Any, inputs: Any, blocks: Any, *, at_once: bool = False) -> list[Tensor]:
    """out, dq, dk and dv of a kernel, joined and added up; forward block by block, or at once."""
    q, k, v, dout = inputs
    partial = Partial(q)
    for call in [blocks] if at_once else [[block] for block in blocks]:
        partial.add(kernel.forward((q, k, v), call, 0.3))
    out, lse = partial.result()
    queries, keys = kernel.backward((q, k, v), (out, lse, dout), blocks, 0.3)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for start, stop, (dq,) in queries:
        grads[0][start:stop] += dq
    for start, stop, pair in keys:
        for total, part in zip(grads[1:], pair, strict=True):
            total[start:stop] += part
    return [out, *grads]


def expected(dense: Any, inputs: Any) -> list[Tensor]:
    """out, dq, dk and dv of the written-out formula."""
    *qkv, dout = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, _ = dense(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class Broken(TorchCpu):
    """A kernel whose scale is a little off."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        return super().forward(qkv, blocks, scale * 1.01)
