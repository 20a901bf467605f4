"""Two bounds: the same computation with no communication, and one process for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.engines.engine import Attention, Cannot
from benchmarks.attention.layer import Layer
from uspft.config.algorithms import CONTEXT
from uspft.kernels import Kernel, Partial
from uspft.kernels.merge import Sum
from uspft.kernels.torch_cpu import TorchCpu
from uspft.sequence import Heads, Share, make_algorithm


def one_process(layer: Layer) -> Attention:
    """Rank 0 calls torch's scaled_dot_product_attention for each document; the others wait."""
    held = torch.arange(layer.tokens if dist.get_rank() == 0 else 0)
    return Attention(held, _by_documents(layer.lengths))


def _by_documents(lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*by_head, strict=True)
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    return attend


def no_communication(layer: Layer) -> Attention:
    """This rank computes its share under planned_cp with every key at hand and nothing sent.

    dk and dv are of this rank's own queries alone, so only out and dq equal dense attention.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    algorithm = make_algorithm(CONTEXT["planned_cp"], 1, world)
    heads = Heads(layer.query_heads, layer.kv_heads, layer.dim)
    for _, what, _ in algorithm.problems(layer.tokens, heads):
        raise Cannot(what)
    order = algorithm.token_order(layer.documents)
    plan = Share([layer.documents], [order], (1, rank))
    held = [torch.cat([torch.arange(a, b) for a, b in runs]) for runs in order]
    keys, values = layer.draw("k"), layer.draw("v")
    others = [
        (keys[positions], values[positions]) if source != rank and plan.blocks[source] else None
        for source, positions in enumerate(held)
    ]
    del keys, values
    share = _Share(plan, others, layer.scale, TorchCpu())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Alone.apply(q, k, v, share)
        return out

    return Attention(held[rank], attend, results=("out", "dq"))


class _Share:
    """A rank's blocks and the others' keys that they see."""

    def __init__(
        self, plan: Share, others: list[tuple[Tensor, Tensor] | None], scale: float, kernel: Kernel
    ) -> None:
        self.blocks_here, self.scale, self.kernel = plan.blocks_here, scale, kernel
        self.stages = [
            (pair, plan.blocks[source]) for source, pair in enumerate(others) if pair is not None
        ]


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: _Share) -> Tensor:
        partial = Partial(q)
        partial.add(share.kernel.forward((q, k, v), share.blocks_here, share.scale))
        for pair, blocks in share.stages:
            partial.add(share.kernel.forward((q, *pair), blocks, share.scale))
        out, lse = partial.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share = share
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        share, saved = ctx.share, (out, lse, dout)
        dq, dkv = Sum(q.shape, q), Sum((2, *k.shape), k)
        queries, keys = share.kernel.backward((q, k, v), saved, share.blocks_here, share.scale)
        dq.add(queries)
        dkv.add(keys)
        for pair, blocks in share.stages:
            dq.add(share.kernel.backward((q, *pair), saved, blocks, share.scale)[0])
        dk, dv = dkv.result()
        return dq.result(), dk, dv, None
