"""One rank's forward and backward of a model, on meta tensors or real ones, and its live bytes.

Layers are those that a run has, through the same modules. Attention's kernel allocates what it
returns: what one needs beside that is to be measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.memory.livebytes import LiveBytes
from benchmarks.memory.measured import Counted, counting_of, measure, one_of
from uspft.batch import Batch
from uspft.comm import Books
from uspft.config import ParallelBlock
from uspft.config.algorithms import CAUSAL, row_of
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.engine.mail import Lines
from uspft.engine.pipelined import pipelined
from uspft.families.table import chosen_experts
from uspft.kernels import Kernel
from uspft.kernels.varlen import Varlen, VarlenKernel
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.model import linear
from uspft.model.build import choose_trained, hold_corrections
from uspft.model.causal import CausalModel
from uspft.model.hf_config import heads_of_layers, layer_windows, softcap_of
from uspft.model.linear import bind_linear_layers
from uspft.model.offload import Copies
from uspft.model.parallel import shards_under
from uspft.model.parallelise import divide_matrices, save_memory
from uspft.model.staged import StagedModel
from uspft.model.tile_sizes import tile_tokens
from uspft.model.tiles import TiledCall
from uspft.objective import TrainedModel, make_objective
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Stages
from uspft.segments import Segments
from uspft.sequence import Share, make_algorithm
from uspft.sequence.chunked import Chunked, Cut
from uspft.sequence.states import Mixed
from uspft.tensor import tensor_algorithm
from uspft.world import World

ALL_TILES = TiledCall.spans
CONFIG = Path("config.json")
"""Stands for the model's config where a recipe would name one; it is not read."""


def returns(softcap: float | None = None) -> VarlenKernel:
    """Return a kernel that computes nothing, and allocates what a GPU's returns. softcap: of
    scores, which it says that it has."""

    def forward(q: Tensor, k: Tensor, v: Tensor, x: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return torch.empty_like(q), lse

    def backward(
        qkv: tuple[Tensor, ...], saved: tuple[Tensor, Tensor, Tensor], x: Varlen, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in qkv)
        return dq, dk, dv

    return VarlenKernel("returns", forward, backward, softcap)


class _Returned(torch.autograd.Function):
    """A rule with a state that computes nothing, and allocates what a GPU's returns."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*x)
        _, k, v, g, _, *_ = x
        state = v.new_empty((v.shape[1], k.shape[2], v.shape[2]), dtype=g.dtype)
        return torch.empty_like(v, memory_format=torch.contiguous_format), state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        like = torch.contiguous_format
        return tuple(torch.empty_like(x, memory_format=like) for x in ctx.saved_tensors)


def returned(
    stock: Any, passed: dict[str, Any], x: Mixed, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Stand in for the rule of a layer with a state, as `returns` does for attention's kernel."""
    found: tuple[Tensor, Tensor] = _Returned.apply(*x, *([] if state is None else [state]))
    return found


def count(
    config: Any,
    tokens: int,
    memory: MemoryBlock,
    layout: Layout | None = None,
    algorithm: str = "ulysses_cp",
    *,
    rows: int = 1,
    fake: bool = True,
    every_tile: bool = True,
    parallel: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    **options: Any,
) -> Counted:
    """Count the bytes of rows of one document each on the rank that has the most.

    The ranks that are counted are those of a ring, whose members need other keys, and those of
    Ulysses, unless all of them have equally many heads. What waits on the host is of the one that
    has most there.
    config: of transformers, with the compute type. tokens: of a whole row. fake: on meta tensors,
    which need neither memory nor much time; else on real ones, into which nothing arrives.
    every_tile: whether all tiles of MLPs and norms run; else the first two and the last, between
    which each has the bytes of the one before it. parallel: what a recipe's `parallel_config` says
    of how matrices are split. trained: `adapter` and `freeze` of a recipe's `model`. options: of
    the algorithm.
    """
    device = torch.device("meta" if fake else "cpu")
    layout = layout or Layout()
    found = []
    windows = set(layer_windows(config))
    if len(windows) == 1:  # tokens are then in an order made for it, as a run's are
        options["window"] = windows.pop()
    ranks, each = layout.mesh_columns * layout.ulysses, heads_of_layers(config)
    even = all(
        one.query % ranks == 0 and (one.kv % ranks == 0 or ranks % one.kv == 0) for one in each
    )
    step = ranks if even else layout.mesh_columns
    options["keep"] = not (memory.gradient_checkpointing or memory.heads_at_once)
    for rank in range(0, layout.mesh_columns * layout.context, step):
        with one_of(layout.ranks, rank):
            groups = Groups()
            kernel = returns(softcap_of(config))
            world = world_of(layout, algorithm, device, kernel, parallel, groups=groups, **options)
            with device, nullcontext() if every_tile else patch.object(TiledCall, "spans", _few):
                of = config, tokens, memory, world, groups, trained
                found.append(count_here(*of, rows=rows))
    most = max(found, key=lambda counted: counted.most_bytes["all"])
    return replace(most, host_bytes=max(counted.host_bytes for counted in found))


class _Engine:
    """What a pipeline's runner asks of its engine, without one."""

    stage = 1

    def __init__(self, module: StagedModel, device: torch.device) -> None:
        self.module, self.device = module, device
        self.deepspeed = SimpleNamespace(zero_optimization_stage=lambda: 2)
        self.laps = SimpleNamespace(mark=lambda: None)

    def take(self, batch: Batch, scales: Any, stage: int, x: Tensor | None) -> Tensor:
        made: Tensor = self.module(batch, scales, stage, x)
        return made

    def backward(self, loss: Tensor, batch: Batch, *, last: bool) -> None:
        loss.backward()


def count_stages(
    config: Any,
    tokens: int,
    memory: MemoryBlock,
    layout: Layout,
    schedule: Schedule,
    micro_batches: int,
    *,
    trained: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
    cut: Cut | None = None,
    algorithm: str = "ulysses_cp",
) -> list[int]:
    """Count by rank along a pipeline the most bytes alive in a step of so many micro-batches, each
    a row of one document, on meta tensors; messages are received as soon as they are waited for.

    layout, schedule: of several stages, of the sizes given. cut: how rows are cut into chunks, if
    they are. The other arguments are those of `count`.
    """
    device, stages = torch.device("meta"), Stages.of_sizes(schedule.sizes, layout.pipeline)
    found, each = [], layout.ranks // layout.pipeline
    for place in range(layout.pipeline):
        with one_of(layout.ranks, place * each):
            groups = Groups()
            world = world_of(layout, algorithm, device, returns(), parallel, groups=groups)
            world = replace(world, stages=stages, schedule=schedule)
            if cut:
                world = replace(world, algorithm=Chunked(world.algorithm, cut))
            with device, _no_messages():
                whole, holders = built(config, memory, world, groups, trained)
                parts = whole.parts, whole.objective, world, groups, holders
                module, pipeline = pipelined(*parts)
                share = world.share([Segments.single(tokens)])
                batches = [_with_chunks(world, share) for _ in range(micro_batches)]
                engine: Any = _Engine(module, device)
                counting = counting_of(module)
                host = patch.object(Copies, "to_host", _apart(counting))
                here = _even(config, world, _held(share), counting)
                with host, here, patch.object(linear, "in_pieces", returned), counting:
                    whole.parts.head_of_loss.weight.detach()  # a copy of a tied table is counted
                    pipeline(engine, batches, (1.0,))
                found.append(counting.most["all"])
    return found


def _with_chunks(world: World, share: Share) -> Batch:
    """Return a micro-batch, chunk by chunk too where its share has chunks."""
    every = share.chunks.every if share.chunks else ()
    return replace(_batch(world, share), chunks=tuple(_batch(world, one) for one in every))


@contextmanager
def _no_messages() -> Iterator[None]:
    """Let messages come and go at once, with nothing in them."""
    done = SimpleNamespace(wait=lambda: None)
    with (
        patch.object(Lines, "send", lambda *_: done),
        patch.object(Lines, "receive", lambda *_: done.wait),
    ):
        yield


def world_of(
    layout: Layout,
    algorithm: str,
    device: torch.device,
    kernel: Kernel,
    parallel: Mapping[str, Any] | None = None,
    *,
    groups: Groups | None = None,
    **options: Any,
) -> World:
    """Make a layout live with an algorithm that shares rows. parallel, options: as of `count`."""
    row = row_of(algorithm, layout.context)
    block = ParallelBlock(model_parallel=layout.tensor, **(parallel or {}))
    options = {"keep": False, **options}
    made = make_algorithm(row, layout.ulysses, layout.ring, **options)
    named = row, made, tensor_algorithm(block, layout)
    return World(make_mesh(layout, groups or Groups(), Books()), *named, kernel, device)


def count_here(
    config: Any,
    tokens: int,
    memory: MemoryBlock,
    world: World,
    groups: Groups | None = None,
    trained: Mapping[str, Any] | None = None,
    rows: int = 1,
) -> Counted:
    """Count rows of one document each as this rank holds them, in the world that is up."""
    share = world.share([Segments.single(tokens)] * rows)
    module = module_of(config, memory, world, groups or Groups(), trained)
    batch = _batch(world, share)
    counting = LiveBytes()
    with (
        patch.object(Copies, "to_host", _apart(counting)),
        patch.object(linear, "in_pieces", returned),
        _even(config, world, _held(share), counting),
    ):
        layers = module.parts.model.base_model.layers
        scales = (1.0,) * len(module.objective.terms)
        return measure(module, layers, lambda: module(batch, scales).sum(), counting)


@contextmanager
def _even(config: Any, world: World, tokens: int, counting: LiveBytes) -> Iterator[None]:
    """Let as many tokens go to each rank that divides experts as do on the mean, where on meta no
    router chooses. tokens: of this rank."""
    ranks = world.layout.experts
    if ranks == 1:
        yield
        return
    met, every = chosen_experts(vars(config))
    to_each = round(tokens * (1 - comb(every - every // ranks, met) / comb(every, met)))
    pairs_of_row = tokens * met / (ranks * to_each)

    def chosen(mask: Tensor) -> int:
        if mask.shape == (ranks, tokens):
            return ranks * to_each
        return round(len(mask) * pairs_of_row)

    counting.chosen = chosen
    with patch.object(Tensor, "tolist", lambda self: [[to_each] * ranks] * len(self)):
        yield


def _few(call: TiledCall, x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first two tiles of x, and the last."""
    every = list(ALL_TILES(call, x))
    yield from (*every[:2], *every[2:][-1:])


def _apart(counting: LiveBytes) -> Any:
    """Return what copies to the host, and is counted apart."""
    plain = Copies.to_host

    def to_host(copies: Any, flat: Tensor) -> list[Tensor]:
        with counting.on_host():
            return plain(copies, flat)

    return to_host


def module_of(
    config: Any,
    memory: MemoryBlock,
    world: World | None = None,
    groups: Groups | None = None,
    trained: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """Return a model of random weights with its loss, which saves memory as a recipe says, and of
    whose matrices a rank of a world holds its parts."""
    return built(config, memory, world, groups, trained)[0]


def built(
    config: Any,
    memory: MemoryBlock,
    world: World | None = None,
    groups: Groups | None = None,
    trained: Mapping[str, Any] | None = None,
) -> tuple[TrainedModel, Holders | None]:
    """Return the model of `module_of`, and who holds which parts of it in a world."""
    from transformers import AutoModelForCausalLM

    from uspft.model.attention import NAME

    model = AutoModelForCausalLM.from_config(
        config, dtype=config.dtype, attn_implementation=NAME
    ).train()
    hold_corrections(model)
    bind_linear_layers(model)
    choose_trained(model, ModelBlock(config=CONFIG, **(trained or {})), 0)
    model.to(config.dtype)  # adapters too
    held, holders, stages = Layout(), None, world.stages if world else None
    if world and groups:
        held = world.layout
        shards = shards_under(model, places(model), world)
        holders = Holders.of(shards, world.mesh.rank, groups, shapes_of(places(model)))
        _split(model, world, holders)
    recompute, offload = save_memory(model, memory, stages)
    loss = tile_tokens(memory.loss_tile_tokens, config.vocab_size)
    parts = CausalModel(model, loss, held, recompute, offload=offload)
    return TrainedModel(parts, make_objective(CAUSAL.name, config)).train(), holders


def _split(model: Any, world: World, holders: Holders) -> None:
    """Leave a rank its parts of a model's matrices, and make it compute with them."""
    for name, (whole, owners) in places(model).items():
        size = holders.part(name).size
        part = nn.Parameter(whole.new_empty(size), whole.requires_grad)
        for module, attribute in owners:
            setattr(module, attribute, part)
    divide_matrices(model, [world], holders)


def _held(share: Share) -> int:
    """Return the tokens of this rank."""
    return sum(b - a for a, b in share.held)


def _batch(world: World, share: Share) -> Batch:
    held = _held(share)
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
