"""The variable-length path of the CUDA kernels, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from uspft.kernels import Block, Mask, Partial
from uspft.kernels.torch_cpu import TorchCpu
from uspft.kernels.varlen import Varlen, VarlenKernel


def varlen_on_cpu(
    note: Callable[[torch.Tensor, torch.Tensor], None] = lambda q, k: None,
) -> VarlenKernel:
    """The variable-length path over a CPU kernel that takes cumulative lengths; note: is told the
    queries and keys of each forward call."""

    def forward(q: Any, k: Any, v: Any, x: Varlen, scale: float) -> Any:
        note(q, k)
        return cpu_forward(q, k, v, x, scale)

    return VarlenKernel("varlen", forward, cpu_backward)


def cpu_forward(q: Any, k: Any, v: Any, x: Varlen, scale: float) -> tuple[Any, Any]:
    """(out, lse) of a variable-length call."""
    partial = Partial(q)
    partial.add(TorchCpu().forward((q, k, v), blocks_of(x), scale))
    return partial.result()


def cpu_backward(qkv: Any, saved: Any, x: Varlen, scale: float) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of a variable-length call."""
    queries, keys = TorchCpu().backward(qkv, saved, blocks_of(x), scale)
    dq = torch.cat([g.tensors[0] for g in queries])
    dk, dv = (torch.cat([g.tensors[i] for g in keys]) for i in range(2))
    return dq, dk, dv


def blocks_of(x: Varlen) -> list[Block]:
    mask = Mask.CAUSAL if x.causal else Mask.FULL
    q, k = x.cu_q.tolist(), x.cu_k.tolist()
    return [Block(q[i], q[i + 1], k[i], k[i + 1], mask) for i in range(len(q) - 1)]
