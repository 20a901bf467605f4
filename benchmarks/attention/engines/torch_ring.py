"""torch.distributed's context parallel, from its private module.

Its public `context_parallel()` has no rule for the CPU's flash op, so the ring below it is called
with that op, and the op's backward, as the public entry does on a GPU. Known to work: torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.engines.engine import Attention, Cannot, Make
from benchmarks.attention.engines.per_document import per_document, zigzag
from benchmarks.attention.layer import Layer

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_TOKENS_DIM = 2


def torch_ring(rotation: str) -> Make:
    """This makes torch's balanced (zigzag) ring; rotation: `alltoall` or `allgather` of keys."""

    def make(layer: Layer) -> Attention:
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention as ring
        except ImportError as error:
            raise Cannot(f"torch {torch.__version__} has moved its ring: {error}") from error
        rank, world = dist.get_rank(), dist.get_world_size()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            by_head = (x.transpose(0, 1)[None] for x in (q, k, v))
            out: Tensor = _Ring.apply(*by_head, ring, rotation)
            return out[0].transpose(0, 1)

        return per_document(layer, 2 * world, lambda n: zigzag(rank, world, n), attend)

    return make


def _choose(ring: Any, rotation: str) -> None:
    """The module's options are global: whoever comes next may have another rotation."""
    ring.set_rotate_method(rotation)
    ring._cp_options.enable_load_balance = True


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Any, rotation: str) -> Tensor:
        _choose(ring, rotation)
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, _TOKENS_DIM, _FLASH, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.rotation = ring, rotation
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        _choose(ctx.ring, ctx.rotation)
        dq, dk, dv, *_ = ctx.ring._templated_ring_attention_backward(
            dist.group.WORLD,
            _TOKENS_DIM,
            _FLASH_BACKWARD,
            grad_out=dout.contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return dq, dk, dv, None, None
