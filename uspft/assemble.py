"""READ FIRST: how a recipe becomes a run, every part built in the order in which data flows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.load import load_state
from uspft.checkpoint.weights_of import WeightsOf, weights_of
from uspft.config import Recipe
from uspft.config.algorithms import TENSOR, row_of
from uspft.config.problems import RunFailed
from uspft.config.recipe import MemoryBlock
from uspft.data import Corpus, RowStream, training_rows
from uspft.data.loader import EMPTY, StepLoader
from uspft.engine.deepspeed_config import micro_batches
from uspft.engine.zero import ZeroEngine, partitioner
from uspft.job import Job
from uspft.kernels import believed_kernel
from uspft.layout import Layout, layout_of
from uspft.mesh import Groups
from uspft.model.build import empty_model
from uspft.model.causal import CausalLoss
from uspft.model.hf_config import layer_windows, model_config
from uspft.model.loss import tile_tokens
from uspft.model.offload import offload_inputs
from uspft.model.recompute import Recompute, recompute_layers
from uspft.model.tiles import inner_features, mlp_tile_tokens, work_in_tiles
from uspft.model.trained import choose_trained
from uspft.parameters.fill import fill
from uspft.parameters.shards import Holders
from uspft.sequence import Heads, of_recipe
from uspft.sequence.rows.heads import split_heads
from uspft.tensor import tensor_algorithm
from uspft.world import World, make_world


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
    loader: StepLoader
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
    layout = this_layout(recipe)

    shapes, softcap = head_shapes(config, layout), getattr(config, "attn_logit_softcapping", None)
    wish = recipe.model.attention
    kernel, refused = believed_kernel(wish, shapes, dtype, device, softcap, said_by_all=said_by_all)
    windows = set(layer_windows(config))
    window = windows.pop() if len(windows) == 1 else None
    row = row_of(recipe.parallel_config.context_parallel_algo, layout.context)
    tensor = tensor_algorithm(recipe.parallel_config, layout)
    named = row, of_recipe(recipe, layout, window), tensor
    world = make_world(layout, named, kernel, device, groups)

    loader = make_loader(job, world)

    checkpoint = Checkpoint.known(job.resume_from) if job.resume_from else None
    model = empty_model(config, dtype)
    choose_trained(model, recipe.model, recipe.seed)
    how = import_module(TENSOR[recipe.parallel_config.tensor_parallel_algo].model)
    shards = how.shards_of(
        model, layout, splits_tokens=tensor.splits_tokens, tensor_of_rows=tensor_of_rows
    )
    holders = Holders.of(shards, world.mesh.rank, groups)
    source = weights(recipe.model, recipe.seed, model, checkpoint)
    fill(model, dtype, source, holders, partitioner(recipe, holders))
    how.split_model(model, holders)
    model.train()
    recompute, offload = save_memory(model, recipe.memory)
    tile = tile_tokens(recipe.memory.loss_tile_tokens, config.vocab_size)

    passes = micro_batches(recipe, layout)
    module = CausalLoss(model, tile, layout.mesh_columns, recompute, offload=offload)
    engine = ZeroEngine(module, recipe, holders, device, passes=passes)
    if checkpoint:
        empty = loader.batch([EMPTY] * recipe.training.micro_batch_size)
        load_state(engine, checkpoint, empty)
    first_step = checkpoint.step if checkpoint else 0
    evaluation = evaluation_sets(job, world)
    return Run(job, groups, world, loader, evaluation, model, engine, config, first_step, refused)


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


def make_loader(job: Job, world: World) -> StepLoader:
    """Return the loader of the training rows, which end with the last epoch if `epochs` is set."""
    data, training = job.recipe.data, job.recipe.training
    stream = training_rows(data, job.corpus, job.recipe.seed)
    return StepLoader(
        stream,
        world,
        row_tokens=data.sequence_length,
        rows_per_step=training.global_batch_size,
        rows_per_batch=training.micro_batch_size,
        last_row=stream.rows_in(training.epochs) if training.epochs else None,
    )


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
