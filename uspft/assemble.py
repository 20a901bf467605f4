"""READ FIRST: how a recipe becomes a run, every part built in the order in which data flows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.load import load_state
from uspft.checkpoint.weights_of import WeightsOf, weights_of
from uspft.config import Recipe
from uspft.config.algorithms import row_of
from uspft.config.problems import RunFailed
from uspft.config.recipe import MemoryBlock
from uspft.config.strategies import layouts_of, strategies_of
from uspft.data import Corpus, RowStream, training_rows
from uspft.data.loader import RowLoader, StepLoader, StepRows
from uspft.data.orders import Orders
from uspft.engine.deepspeed_config import micro_batches
from uspft.engine.step import Engine
from uspft.engine.zero import ZeroEngine, partitioner
from uspft.job import Job
from uspft.kernels import believed_kernel
from uspft.layout import Layout, layout_of
from uspft.mesh import Groups
from uspft.model import grid, parallel
from uspft.model.build import empty_model
from uspft.model.causal import CausalLoss
from uspft.model.hf_config import layer_windows, model_config
from uspft.model.loss import tile_tokens
from uspft.model.offload import offload_inputs
from uspft.model.recompute import Recompute, recompute_layers
from uspft.model.tiles import inner_features, mlp_tile_tokens, work_in_tiles
from uspft.model.trained import choose_trained
from uspft.parameters.fill import fill, shapes_of
from uspft.parameters.shards import Holders, Shards
from uspft.sequence import Heads, of_recipe
from uspft.sequence.rows.heads import split_heads
from uspft.switching.dealing import switching_loader
from uspft.switching.moving import MovingEngine
from uspft.tensor import tensor_algorithm
from uspft.world import World, make_world

SOFTCAP = "attn_logit_softcapping"
"""The field of a model's config that bounds its attention scores, where it has one."""


@dataclass(frozen=True)
class EvalSet:
    """One source of `data.eval`, packed into rows."""

    title: str
    loader: StepLoader
    """Its step i is forward pass i, in which each replica takes one micro-batch."""
    passes: int
    """The number of forward passes that take every row once."""


@dataclass(frozen=True)
class Run:
    """A run with all its parts built."""

    job: Job
    groups: Groups
    """The process groups, which belong to the process: several runs may share them."""
    world: World
    """The recipe's layout, and with strategies that of the longest rows."""
    loader: RowLoader
    evaluation: list[EvalSet]
    model: Any
    """The transformers model whose parameters the engine trains."""
    engine: Engine
    config: Any
    first_step: int
    refused: list[str]
    """A line for each installed attention kernel that was tried first, and refused."""


def assemble(
    job: Job,
    device: torch.device,
    groups: Groups,
    weights: WeightsOf = weights_of,
    *,
    tensor_of_rows: int = 1,
    orders: Orders | None = None,
) -> Run:
    """Build every part of a job's run on this rank; collective.

    torch.distributed and DeepSpeed must be up. groups: the process groups of this process, to which
    the run adds those that it needs. weights: gives the source of the model's weights.
    tensor_of_rows: the largest tensor degree that rows will run at, where some have more than the
    recipe's. orders: where token orders are found; None: in this process. Raises RunFailed where
    another rank has another job.
    """
    same_job(job)
    recipe = job.here
    config = model_config(recipe.model, recipe.data.sequence_length)
    dtype = getattr(torch, recipe.model.dtype)
    worlds, refused = live_worlds(recipe, config, device, groups)
    world = worlds[-1]  # of the longest rows
    moves = recipe.parallel_config.switching == "move"
    by_degree = sorted(worlds, key=lambda one: one.layout.tensor)
    under = by_degree if moves else by_degree[:1]  # the last is how weights are held
    most = 1 if moves else max(tensor_of_rows, by_degree[-1].layout.tensor)

    checkpoint = Checkpoint.known(job.resume_from) if job.resume_from else None
    first_step = checkpoint.step if checkpoint else 0
    loader = make_loader(job, worlds, under, groups, orders)
    loader.begin(first_step + 1)
    model = empty_model(config, dtype, device)
    choose_trained(model, recipe.model, recipe.seed)
    shards = [shards_under(model, one, tensor_of_rows=most) for one in under]
    holders = Holders.of(shards[-1], world.mesh.rank, groups, shapes_of(model))
    source = weights(recipe.model, recipe.seed, model, checkpoint)
    fill(model, dtype, source, holders, None if moves else partitioner(recipe, holders))
    if any(one.layout.is_mesh for one in worlds):
        grid.split_model(model, holders)
    else:
        parallel.split_model(model, holders, moves=moves)
    model.train()
    recompute, offload = save_memory(model, recipe.memory)
    tile = tile_tokens(recipe.memory.loss_tile_tokens, config.vocab_size)

    held = None if moves else under[-1].layout
    module = CausalLoss(model, tile, held, recompute, offload=offload)
    engine: Engine
    if moves:
        hosts = hosts_of_ranks(recipe)
        engine = MovingEngine(module, recipe, holders, shards, device, hosts=hosts)
    else:
        passes = most_passes(recipe, world.layout)
        engine = ZeroEngine(module, recipe, holders, device, passes=passes)
    if checkpoint:
        load_state(engine, checkpoint, loader.empty())
    evaluation = evaluation_sets(job, world)
    return Run(job, groups, world, loader, evaluation, model, engine, config, first_step, refused)


def shards_under(model: Any, world: World, *, tensor_of_rows: int) -> Shards:
    """Return who holds what of a model on meta under a layout.

    tensor_of_rows: the largest tensor degree of rows that use parts of it.
    """
    layout, tokens = world.layout, world.tensor.splits_tokens
    if layout.is_mesh:
        return grid.shards_of(model, layout, tensor_of_rows=tensor_of_rows)
    return parallel.shards_of(model, layout, splits_tokens=tokens, tensor_of_rows=tensor_of_rows)


def save_memory(model: Any, block: MemoryBlock) -> tuple[Recompute | None, bool]:
    """Make a model's layers keep less, as the recipe says.

    Returns what of attention they make again, and whether what they keep waits on the host.
    """
    recompute, offload = recompute_layers(model, block), block.offload_activations == "cpu"
    if offload:
        offload_inputs(model)
    if tile := mlp_tile_tokens(block.mlp_tile_tokens, inner_features(model.config)):
        work_in_tiles(model, tile)
    return recompute, offload


def live_worlds(
    recipe: Recipe, config: Any, device: torch.device, groups: Groups
) -> tuple[list[World], list[str]]:
    """Make the layout of each strategy live, or the one that there is; collective.

    Returns them with a line for each attention kernel that was tried first, and refused.
    """
    every = [(one, this_layout(one)) for one in layouts_of(recipe)]
    dtype, softcap = getattr(torch, recipe.model.dtype), getattr(config, SOFTCAP, None)
    shapes = sorted({shape for _, layout in every for shape in head_shapes(config, layout)})
    wish = recipe.model.attention
    kernel, refused = believed_kernel(wish, shapes, dtype, device, softcap, said_by_all=said_by_all)
    windows = set(layer_windows(config))
    window = windows.pop() if len(windows) == 1 else None
    worlds = []
    for one, layout in every:
        row = row_of(one.parallel_config.context_parallel_algo, layout.context)
        tensor = tensor_algorithm(one.parallel_config, layout)
        named = row, of_recipe(one, layout, window), tensor
        worlds.append(make_world(layout, named, kernel, device, groups))
    return worlds, refused


def hosts_of_ranks(recipe: Recipe) -> list[int]:
    """Return the number of the host that each rank is on."""
    each = recipe.launch.processes
    assert isinstance(each, int)  # settled before ranks start
    return [rank // each for rank in range(dist.get_world_size())]


def most_passes(recipe: Recipe, layout: Layout) -> int:
    """Return the most micro-batches that a rank has in a step."""
    if strategies_of(recipe):  # a row holds at least one sample
        return recipe.training.global_batch_size
    return micro_batches(recipe, layout)


def said_by_all(mine: str) -> list[str]:
    """Gather one string from every rank and return them in rank order; collective."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def same_job(job: Job) -> None:
    """Require that every rank has the same job; collective. Raises RunFailed.

    Hosts may differ in files, overrides or versions.
    """
    if len(set(said_by_all(f"{job.fingerprint():x}"))) > 1:
        raise RunFailed(
            f"this host and another run different things (here {job.fingerprint():x}): recipe, "
            f"overrides, data ({job.corpus.name}), steps ({job.steps}) or checkpoint "
            f"({job.resume_from}) differ"
        )


def this_layout(recipe: Recipe) -> Layout:
    """Return the layout of a resolved recipe."""
    layout = layout_of(recipe.parallel_config, None)
    assert isinstance(layout, Layout)  # the check before the run has refused everything else
    return layout


def make_loader(
    job: Job,
    worlds: Sequence[World],
    holders: Sequence[World],
    groups: Groups,
    orders: Orders | None = None,
) -> RowLoader:
    """Return the loader of the training rows, which end with the last epoch or step.

    worlds: of each strategy, or of the one layout. holders: of them, those under which ranks hold
    the parameters, of which there are several where weights move. Collective.
    """
    recipe, data, training = job.recipe, job.recipe.data, job.recipe.training
    switches = bool(strategies_of(recipe))
    stream = training_rows(data, job.corpus, recipe.seed, one_document=switches)
    each = training.global_batch_size
    last = stream.rows_in(training.epochs) if training.epochs else job.steps * each
    if not switches:
        return StepLoader(
            stream,
            worlds[0],
            row_tokens=data.sequence_length,
            rows_per_step=each,
            rows_per_batch=training.micro_batch_size,
            last_row=last,
            orders=orders,
        )
    of_step = StepRows(each, last)
    return switching_loader(job, stream, of_step, (worlds, holders), groups, orders=orders)


def evaluation_sets(job: Job, world: World) -> list[EvalSet]:
    """Return the evaluation sets, each packed as in training, with every row once in file order."""
    data, training = job.recipe.data, job.recipe.training
    each = training.eval_micro_batch_size or training.micro_batch_size
    at_once = each * world.layout.data
    found = []
    for title, folder in job.evaluation.items():
        stream = RowStream(
            Corpus.open(folder), data.sequence_length, data.packing, False, job.recipe.seed
        )
        rows = stream.rows_in(1)
        loader = StepLoader(
            stream,
            world,
            row_tokens=data.sequence_length,
            rows_per_step=at_once,
            rows_per_batch=each,
            last_row=rows,
        )
        found.append(EvalSet(title, loader, math.ceil(rows / at_once)))
    return found


def head_shapes(config: Any, layout: Layout) -> list[Heads]:
    """Return the heads of the attention calls that ranks make, each combination once.

    Every rank tries kernels on all of them, so that all ranks choose the same kernel.
    """
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, kv, _ = Heads(config.num_attention_heads, config.num_key_value_heads, dim).on(
        layout.mesh_columns
    )
    calls = split_heads(query, kv, layout.ulysses).calls(query // kv)
    return [Heads(query, kv, dim) for query, kv in sorted(calls)]
