"""yunchang's LongContextAttention with its zigzag ring (arXiv 2405.07719).

As shipped it computes nothing on CPU. Three things are patched, its communication is its own:
the kernels (it calls CUDA's flash op; here torch's CPU one), a running gradient that float32 makes
an alias of the next step's buffer (wrong dk, dv without an error), and the message that a ring of
one sends to itself (gloo refuses it). Known to work: yunchang 0.6.4.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.engines.engine import Attention, Cannot, Make
from benchmarks.attention.engines.per_document import per_document
from benchmarks.attention.layer import Layer

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ALIASED = ".to(torch.float32)\n"


def yunchang_usp(ulysses: int) -> Make:
    """This makes yunchang's USP; ulysses: the all-to-all's degree, the ring has the other ranks."""

    def make(layer: Layer) -> Attention:
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % ulysses:
            raise Cannot(f"Ulysses {ulysses} needs {ulysses} processes")
        if layer.kv_heads % ulysses:
            raise Cannot(f"Ulysses {ulysses} does not divide {layer.kv_heads} KV heads")
        import yunchang
        from yunchang.kernels import AttnType
        from yunchang.ring import zigzag_ring_flash_attn

        _patch(zigzag_ring_flash_attn)
        ring = world // ulysses
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, world)
        whole = yunchang.LongContextAttention(
            ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH
        )

        def place(tokens: int) -> Tensor:
            row = torch.arange(tokens).view(1, tokens, 1)
            cut = yunchang.EXTRACT_FUNC_DICT["zigzag"]
            mine: Tensor = cut(row, rank, world_size=world, rd=ring, ud=ulysses)
            return mine.flatten()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = whole(q[None], k[None], v[None], causal=True)
            return out[0]

        return per_document(layer, 2 * world, place, attend)

    return make


def _patch(module: ModuleType) -> None:
    """Patch the zigzag ring, once. Raises Cannot where its source is another."""
    if module.select_flash_attn_impl is _select:
        return
    source = inspect.getsource(module.zigzag_ring_flash_attn_backward)
    if source.count(_ALIASED) != 3:
        raise Cannot("not the yunchang that the patch was written for (0.6.4)")
    copied = source.replace(_ALIASED, ".to(torch.float32, copy=True)\n")
    exec(compile(copied, module.__file__ or "yunchang", "exec"), module.__dict__)
    module.__dict__["RingComm"] = _without_self_sends(module.RingComm)
    module.__dict__["select_flash_attn_impl"] = _select


def _without_self_sends(ring_comm: Any) -> Any:
    class RingComm(ring_comm):
        _reqs: list[Any] | None

        def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
            if self.world_size == 1:
                return to_send
            received: Tensor = super().send_recv(to_send, recv_tensor)
            return received

        def commit(self) -> None:
            if self.world_size == 1:
                self._reqs = []
            else:
                super().commit()

    return RingComm


def _select(attn_type: Any, stage: str = "", attn_processor: Any = None) -> Any:
    return {"fwd-only": _forward, "bwd-only": _backward}[stage]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, *, causal: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    """[1, T, h, D] each → out as q, lse [1, h, T]."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _FLASH(*by_head, dropout, causal, scale=scale)
    return out.transpose(1, 2), lse


def _backward(*given: Any, **_: Any) -> None:
    """Writes into the buffers of dq, dk and dv."""
    dout, q, k, v, out, lse, dq, dk, dv, dropout, scale, causal = given[:12]
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = _FLASH_BACKWARD(dout, q, k, v, out, lse, dropout, causal, scale=scale)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient.transpose(1, 2))
