"""One rank's forward and backward of a model, on fake tensors or real ones, and its live bytes.

Layers are those that a run has, through the same modules; there is no engine: the gradient of a
parameter is let go of when it has come, as ZeRO does that sums it elsewhere. Attention's kernel
allocates what it returns: what one needs beside that is to be measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory.livebytes import LiveBytes
from uspft.assemble import save_memory
from uspft.batch import Batch
from uspft.config import ParallelBlock
from uspft.config.algorithms import row_of
from uspft.config.recipe import MemoryBlock
from uspft.kernels.varlen import Varlen, VarlenKernel
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.model.causal import CausalLoss
from uspft.model.loss import tile_tokens
from uspft.model.offload import Copies
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.tensor import tensor_algorithm
from uspft.world import World, make_world


@dataclass(frozen=True)
class Counted:
    """The live bytes of one forward and backward on one rank, parameters not counted."""

    kept_bytes: int
    """What is alive between forward and backward."""
    host_bytes: int
    """What waits on the host."""
    most_bytes: dict[str, int] = field(default_factory=dict)
    """The most that is alive at once, in the forward, and in the backward."""


def returns() -> VarlenKernel:
    """Return a kernel that computes nothing, and allocates what a GPU's returns."""

    def forward(q: Tensor, k: Tensor, v: Tensor, x: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return torch.empty_like(q), lse

    def backward(
        qkv: tuple[Tensor, ...], saved: tuple[Tensor, Tensor, Tensor], x: Varlen, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in qkv)
        return dq, dk, dv

    return VarlenKernel("returns", forward, backward)


def count(
    config: Any,
    tokens: int,
    memory: MemoryBlock,
    layout: Layout | None = None,
    algorithm: str = "ulysses_cp",
    *,
    fake: bool = True,
) -> Counted:
    """Count one row of one document as the first of the layout's ranks holds it.

    config: of transformers, with the compute type. tokens: of the whole row. fake: on fake tensors,
    which need neither memory nor much time; else on real ones, into which nothing arrives.
    """
    layout = layout or Layout()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        world = _world(layout, algorithm)
        share = world.share([Segments.single(tokens)])
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
            return _counted(config, memory, world, share)
    finally:
        dist.destroy_process_group()


def _world(layout: Layout, algorithm: str) -> World:
    row = row_of(algorithm, layout.context)
    parallel = ParallelBlock(model_parallel=layout.tensor)
    made = make_algorithm(row, layout.ulysses, layout.ring, keep=False)
    named = row, made, tensor_algorithm(parallel, layout)
    return make_world(layout, named, returns(), torch.device("cpu"), Groups())


def _counted(config: Any, memory: MemoryBlock, world: World, share: Any) -> Counted:
    module = _module(config, memory)
    batch = _batch(world, share)
    counting = LiveBytes()
    counting.ignore(module.parameters())
    with ExitStack() as stack:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_let_go)
        stack.enter_context(patch.object(Copies, "to_host", _apart(counting)))
        stack.enter_context(counting)
        with counting.during("forward"):
            loss = module(batch, 1.0).sum()
        kept = counting.live
        with counting.during("backward"):
            loss.backward()
    return Counted(kept, counting.host, dict(counting.most))


def _apart(counting: LiveBytes) -> Any:
    """Return what copies to the host, and is counted apart."""
    plain = Copies.to_host

    def to_host(copies: Any, flat: Tensor) -> Tensor:
        with counting.on_host():
            return plain(copies, flat)

    return to_host


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def _module(config: Any, memory: MemoryBlock) -> CausalLoss:
    from transformers import AutoModelForCausalLM

    from uspft.model.attention import NAME

    model = AutoModelForCausalLM.from_config(
        config, dtype=config.dtype, attn_implementation=NAME
    ).train()
    recompute, offload = save_memory(model, memory)
    loss = tile_tokens(memory.loss_tile_tokens, config.vocab_size)
    return CausalLoss(model, loss, 1, recompute, offload=offload).train()


def _batch(world: World, share: Any) -> Batch:
    held = sum(b - a for a, b in share.held)
    make: Callable[..., Tensor] = torch.zeros
    one, flat = (1, held), (held,)
    whole = torch.int64
    return Batch(
        world,
        share,
        make(one, dtype=whole),
        make(one, dtype=whole),
        make(flat, dtype=whole),
        torch.arange(held),
        torch.arange(held),
        make(flat, dtype=whole),
        held,
        (0,),
    )
