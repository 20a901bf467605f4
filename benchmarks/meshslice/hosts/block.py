"""A LLaMA block of divided matrices, forward and backward, through the project's own model code: on
a mesh of 2 × 2 in slices; and on the mesh that the tuner picks, beside Megatron's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.lab.processes import Tell
from benchmarks.meshslice.hosts import points
from benchmarks.meshslice.hosts.blocks import MEGATRON, ONE_SLICE, TUNED, tuned
from benchmarks.meshslice.hosts.grids import layout_on
from benchmarks.meshslice.hosts.setting import HOSTS, SQUARE, Setting
from benchmarks.meshslice.hosts.turns import in_turns, require_same
from uspft.comm import Books
from uspft.config.algorithms import row_of
from uspft.families import ModelShape
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.model import grid, parallel
from uspft.model.attention import Bound
from uspft.model.build import empty_model
from uspft.parameters.fill import RandomWeights, fill
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.tensor import TensorAlgorithm
from uspft.tensor.megatron import Megatron
from uspft.tensor.meshslice import MeshSlice
from uspft.world import World

ATTENTION = "planned_cp"
"""How the mesh rows, which hold different tokens of one row, share attention."""


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """This returns the seconds of the block by slices, which are the same for all its products."""
    groups = Groups()
    model = model_of(setting.shape, layout_on(SQUARE), groups)
    calls = {}
    for count in setting.slices:
        tensor = MeshSlice(HOSTS, SQUARE, (count,) * 4)
        world = world_of(layout_on(SQUARE), tensor, groups)
        calls[str(count)] = step_of(model, world, setting.tokens, setting.hidden)
    require_same(calls)
    tell("the block is warm")
    return in_turns(calls, setting.rounds)


def measure_tuned(setting: Setting, tell: Tell) -> dict[str, Any]:
    """This returns the seconds of the block on the mesh that the tuner picks, by what this launch
    has measured before, and under Megatron."""
    groups = Groups()
    measured = points.measure(setting, groups)
    choice = tuned(setting, measured)
    tell(f"the tuner picks {choice.name}")
    flat, mesh = Layout(HOSTS), layout_on(choice.mesh)
    qkv, out, gate_up, down = choice.slices.values()
    slices = qkv, out, gate_up, down
    ways: dict[str, tuple[Layout, TensorAlgorithm]] = {
        MEGATRON: (flat, Megatron(HOSTS, splits_tokens=True)),
        ONE_SLICE: (mesh, MeshSlice(HOSTS, choice.mesh, (1, 1, 1, 1))),
        TUNED: (mesh, MeshSlice(HOSTS, choice.mesh, slices)),
    }
    models = {layout: model_of(setting.shape, layout, groups) for layout in (flat, mesh)}
    sizes = setting.tokens, setting.hidden
    calls = {
        name: step_of(models[layout], world_of(layout, tensor, groups), *sizes)
        for name, (layout, tensor) in ways.items()
    }
    _require_same_norm(calls)
    tell("the block is warm")
    seconds = in_turns(calls, setting.rounds)
    return {"points": measured, "mesh": choice.mesh, "slices": slices, "seconds": seconds}


def step_of(model: Any, world: World, tokens: int, hidden: int) -> Callable[[], Tensor]:
    """This returns a forward and backward of a model's blocks, which gives the gradient of their
    input, a row of so many tokens.

    Every layout takes its part of the same input.
    """
    share = world.share([Segments.single(tokens)])
    held = torch.cat([torch.arange(start, stop) for start, stop in share.held])
    bound = Bound(world, share, held, recompute=None)
    columns, draw = world.mesh.columns, torch.Generator().manual_seed(1)
    whole = (torch.randn(tokens, hidden, generator=draw) for _ in range(2))
    if world.tensor.splits_tokens:
        own = [each[held].chunk(columns.size)[columns.index] for each in whole]
    else:
        own = [each[held].chunk(columns.size, -1)[columns.index] for each in whole]
    x, slope = (each[None].contiguous() for each in own)
    return partial(_step, model, bound, x, slope)


def _step(model: Any, bound: Bound, x: Tensor, slope: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    x = x.requires_grad_()
    x.grad = None
    place = bound.tokens[None]
    found = model.base_model(inputs_embeds=x, position_ids=place, use_cache=False, uspft=bound)
    found.last_hidden_state.backward(slope)
    assert x.grad is not None
    return x.grad


def _require_same_norm(calls: Mapping[str, Callable[[], Tensor]]) -> None:
    """This calls each, which warms it up. Raises RuntimeError where the gradients of all ranks
    together have different norms."""

    def norm(call: Callable[[], Tensor]) -> Tensor:
        square = call().double().square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    require_same({name: partial(norm, call) for name, call in calls.items()})


def world_of(layout: Layout, tensor: TensorAlgorithm, groups: Groups) -> World:
    """This makes a layout live, by the way in which mesh rows share attention."""
    row = row_of(ATTENTION, layout.context)
    named = row, make_algorithm(row, layout.ulysses, layout.ring), tensor
    return World(make_mesh(layout, groups, Books()), *named, TorchCpu(), torch.device("cpu"))


def model_of(shape: ModelShape, layout: Layout, groups: Groups, *, copies: bool = False) -> Any:
    """This returns a model's blocks, of which this rank holds its parts; collective.

    copies: whether they may take copies of their tokens by turns.
    """
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
    )
    model = empty_model(config, torch.float32)
    on_mesh = layout.is_mesh
    parameters, weights = places(model), RandomWeights(model, 1, config.initializer_range)
    shards = parallel.shards_of(model, parameters, layout, splits_tokens=True)
    holders = Holders.of(shards, dist.get_rank(), groups, shapes_of(parameters))
    fill(model, parameters, torch.float32, weights, holders)
    if on_mesh:
        grid.split_model(model, holders)
    else:
        parallel.split_model(model, holders, copies=copies)
    return model.train()
