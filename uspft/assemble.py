"""READ FIRST: how a recipe becomes a run, every part built in the order in which data flows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.load import load_state
from uspft.checkpoint.weights_of import WeightsOf, weights_of
from uspft.config import Recipe
from uspft.config.algorithms import TENSOR, WHOLE, row_of
from uspft.config.problems import RunFailed
from uspft.config.strategies import layouts_of, row_lengths, strategies_of
from uspft.data import Corpus, RowStream, training_rows
from uspft.data.loader import RowLoader, StepLoader, StepRows
from uspft.engine.deepspeed_config import micro_batches
from uspft.engine.zero import ZeroEngine, partitioner
from uspft.job import Job, Prices
from uspft.kernels import believed_kernel
from uspft.layout import Layout, layout_of
from uspft.mesh import Groups
from uspft.model.build import empty_model
from uspft.model.causal import CausalLoss
from uspft.model.hf_config import layer_windows, model_config
from uspft.model.loss import tile_tokens
from uspft.model.recompute import recompute_layers
from uspft.model.trained import choose_trained
from uspft.parameters.fill import fill
from uspft.parameters.shards import Holders
from uspft.sequence import Heads, make_algorithm, of_recipe
from uspft.sequence.rows.heads import split_heads
from uspft.switching.dealing import Strategies, SwitchingLoader
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
    engine: ZeroEngine
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
) -> Run:
    """Build every part of a job's run on this rank; collective.

    torch.distributed and DeepSpeed must be up. groups: the process groups of this process, to which
    the run adds those that it needs. weights: gives the source of the model's weights.
    tensor_of_rows: the largest tensor degree that rows will run at, where some have more than the
    recipe's. Raises RunFailed where another rank has another job.
    """
    same_job(job)
    recipe = job.here
    config = model_config(recipe.model, recipe.data.sequence_length)
    dtype = getattr(torch, recipe.model.dtype)
    worlds, refused = live_worlds(recipe, config, device, groups)
    world = worlds[-1]  # of the longest rows
    holder = min(worlds, key=lambda one: one.layout.tensor)
    tensor_of_rows = max(tensor_of_rows, *(one.layout.tensor for one in worlds))

    loader = make_loader(job, worlds, holder, groups)

    checkpoint = Checkpoint.known(job.resume_from) if job.resume_from else None
    model = empty_model(config, dtype, device)
    choose_trained(model, recipe.model, recipe.seed)
    how = import_module(TENSOR[recipe.parallel_config.tensor_parallel_algo].model)
    shards = how.shards_of(
        model,
        holder.layout,
        splits_tokens=holder.tensor.splits_tokens,
        tensor_of_rows=tensor_of_rows,
    )
    holders = Holders.of(shards, world.mesh.rank, groups)
    source = weights(recipe.model, recipe.seed, model, checkpoint)
    fill(model, dtype, source, holders, partitioner(recipe, holders))
    how.split_model(model, holders)
    model.train()
    if recipe.memory.gradient_checkpointing:
        recompute_layers(model)
    tile = tile_tokens(recipe.memory.loss_tile_tokens, config.vocab_size)

    module = CausalLoss(model, tile, holder.layout.mesh_columns)
    engine = ZeroEngine(module, recipe, holders, device, passes=most_passes(recipe, world.layout))
    if checkpoint:
        load_state(engine, checkpoint, loader.empty())
    first_step = checkpoint.step if checkpoint else 0
    evaluation = evaluation_sets(job, world)
    return Run(job, groups, world, loader, evaluation, model, engine, config, first_step, refused)


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


def make_loader(job: Job, worlds: Sequence[World], holder: World, groups: Groups) -> RowLoader:
    """Return the loader of the training rows, which end with the last epoch if `epochs` is set.

    worlds: of each strategy, or of the one layout. holder: of them, the one under which ranks hold
    the parameters. Collective.
    """
    recipe, data, training = job.recipe, job.recipe.data, job.recipe.training
    switches = bool(strategies_of(recipe))
    stream = training_rows(data, job.corpus, recipe.seed, one_document=switches)
    last = stream.rows_in(training.epochs) if training.epochs else None
    if not switches:
        return StepLoader(
            stream,
            worlds[0],
            row_tokens=data.sequence_length,
            rows_per_step=training.global_batch_size,
            rows_per_batch=training.micro_batch_size,
            last_row=last,
        )
    lengths = row_lengths(recipe)
    pairs = zip(worlds, lengths, strict=True)
    rows = training.micro_batch_size
    return SwitchingLoader(
        stream,
        Strategies(
            worlds,
            lengths,
            idle_world(holder, groups),
            most_tokens=rows * max(length / world.layout.context for world, length in pairs),
            together=recipe.deepspeed.zero_optimization.get("stage", 1) > 1,
        ),
        same_prices(job),
        StepRows(training.global_batch_size, last),
        row_tokens=data.sequence_length,
        packing=data.packing,
    )


def idle_world(holder: World, groups: Groups) -> World:
    """Return the layout in which no row is shared, and matrices as `holder` has them; collective.

    It is that of a rank which has no row while others have.
    """
    layout = holder.layout
    alone = replace(layout, ulysses=1, ring=1, data=layout.data * layout.context)
    named = WHOLE, make_algorithm(WHOLE, 1, 1), holder.tensor
    return make_world(alone, named, holder.kernel, holder.device, groups)


def same_prices(job: Job) -> Prices:
    """Return the prices that the first rank has, on every rank; collective."""
    told: list[Prices | None] = [job.prices]
    dist.broadcast_object_list(told, src=0)
    assert told[0]  # the preparation of a recipe with strategies leaves them
    return told[0]


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
