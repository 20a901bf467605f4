"""A LLaMA block on a mesh of 2 × 2, forward and backward, through the project's own model code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.lab.processes import Tell
from benchmarks.meshslice.hosts.grids import layout_on
from benchmarks.meshslice.hosts.setting import SQUARE, Setting
from benchmarks.meshslice.hosts.turns import in_turns, require_same
from uspft.config.algorithms import row_of
from uspft.kernels.torch_cpu import TorchCpu
from uspft.mesh import Groups
from uspft.model.attention import Bound
from uspft.model.build import empty_model
from uspft.model.grid import shards_of, split_model
from uspft.parameters.fill import fill
from uspft.parameters.shards import Holders
from uspft.parameters.source import RandomWeights
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.tensor.meshslice import MeshSlice
from uspft.world import World, make_world

ATTENTION = "planned_cp"
"""How the mesh rows, which hold different tokens of one row, share attention."""


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """This returns the seconds of the block by slices, which are the same for all its products."""
    groups, layout = Groups(), layout_on(SQUARE)
    row = row_of(ATTENTION, layout.context)
    algorithm = make_algorithm(row, layout.ulysses, layout.ring)
    model = _model(setting, groups)
    calls = {}
    for count in setting.slices:
        tensor = MeshSlice(layout.tensor, SQUARE, (count,) * 4)
        named = row, algorithm, tensor
        world = make_world(layout, named, TorchCpu(), torch.device("cpu"), groups)
        calls[str(count)] = step_of(model, world, setting)
    require_same(calls)
    tell("the block is warm")
    return in_turns(calls, setting.rounds)


def step_of(model: Any, world: World, setting: Setting) -> Callable[[], Tensor]:
    """This returns a forward and backward of the block, which gives the gradient of its input."""
    share = world.share([Segments.single(setting.tokens)])
    held = torch.cat([torch.arange(start, stop) for start, stop in share.held])
    draw = torch.Generator().manual_seed(1 + world.mesh.rank)
    width = setting.hidden // world.mesh.columns.size
    x, slope = (torch.randn(1, len(held), width, generator=draw) for _ in range(2))
    return partial(_step, model, Bound(world, share, held, recompute=None), x, slope)


def _step(model: Any, bound: Bound, x: Tensor, slope: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    x = x.requires_grad_()
    x.grad = None
    place = bound.tokens[None]
    found = model.base_model(inputs_embeds=x, position_ids=place, use_cache=False, uspft=bound)
    found.last_hidden_state.backward(slope)
    assert x.grad is not None
    return x.grad


def _model(setting: Setting, groups: Groups) -> Any:
    """This returns a model of one block, of which this rank holds its parts; collective."""
    shape = setting.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=setting.tokens,
        tie_word_embeddings=False,
    )
    model = empty_model(config, torch.float32)
    shards = shards_of(model, layout_on(SQUARE))
    holders = Holders.of(shards, torch.distributed.get_rank(), groups)
    fill(model, torch.float32, RandomWeights(model, 1, config.initializer_range), holders)
    split_model(model, holders)
    return model.train()
