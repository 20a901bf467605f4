"""READ FIRST: how a recipe becomes a run; its parts are built in the order in which data flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.save import load_state
from uspft.checkpoint.weights import WeightsOf, weights_of
from uspft.comm import said_by_all
from uspft.data.rows.loader import EvalSet, Orders, RowLoader, evaluation_sets
from uspft.engine.deepspeed_config import deepspeed_config
from uspft.engine.pipelined import pipelined
from uspft.engine.step import Engine, LossModule
from uspft.engine.zero import ZeroEngine, partitioner
from uspft.job import Job
from uspft.mesh import Groups
from uspft.model.build import choose_trained, empty_model
from uspft.model.causal import CausalModel
from uspft.model.hf_config import heads_of_layers, model_config, shared_window, softcap_of
from uspft.model.linear import believe_linear_layers
from uspft.model.parallel import shards_under
from uspft.model.parallelise import divide_matrices, save_memory
from uspft.objective import TrainedModel, make_objective
from uspft.parameters.fill import fill
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders
from uspft.switching.deal.dealing import training_loader
from uspft.switching.move.moving import MovingEngine
from uspft.world import World, live_worlds


@dataclass(frozen=True)
class Run:
    """A run with all its parts built."""

    job: Job
    groups: Groups
    """The process groups, which belong to the process: several runs may share them."""
    world: World
    """The recipe's layout, or with strategies that of the longest rows."""
    loader: RowLoader
    evaluation: list[EvalSet]
    model: Any
    """The transformers model whose parameters the engine trains."""
    engine: Engine
    config: Any
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes, if any."""
    refused: list[str]
    """A line for each installed attention kernel that was tried first and failed."""

    @property
    def first_step(self) -> int:
        """The step that the run resumes; 0 for a new run."""
        return self.checkpoint.step if self.checkpoint else 0


def assemble(
    job: Job,
    device: torch.device,
    groups: Groups,
    weights: WeightsOf = weights_of,
    *,
    orders: Orders | None = None,
) -> Run:
    """Build every part of a job's run on this rank; collective.

    torch.distributed and DeepSpeed must be initialised. groups: the process groups of this process,
    to which the run adds those that it needs. weights: returns the source of the model's weights.
    orders: the cache of token orders; None: one in this process. Raises RunFailed where another
    rank has another job.
    """
    job.require_same(said_by_all)
    recipe = job.here
    moves = recipe.parallel_config.switching == "move"

    # Layouts: process groups, the algorithms that split rows and matrices, stages, the kernel.
    config = model_config(recipe.model, recipe.data.sequence_length)
    attention = heads_of_layers(config), shared_window(config), softcap_of(config)
    worlds, refused = live_worlds(recipe, *attention, device, groups, job.chunk_prices)
    world = worlds[-1]  # of the longest rows
    by_degree = sorted(worlds, key=lambda one: one.layout.stored_as)
    under = by_degree if moves else by_degree[:1]  # weights are stored in each of these layouts
    most = max(one.layout.tensor for one in worlds)  # of any rows

    # Rows: those of the first step are prepared in the background while the model is built.
    checkpoint = Checkpoint.known(job.resume_from) if job.resume_from else None
    loader = training_loader(job, worlds, under, groups, orders)
    loader.begin(checkpoint.step + 1 if checkpoint else 1)
    evaluation = evaluation_sets(job, world)

    # The model, with this rank's parts of its parameters.
    dtype = getattr(torch, recipe.model.dtype)
    model = empty_model(config, dtype, device)  # with the hook by which attention is split
    choose_trained(model, recipe.model, recipe.seed)
    believe_linear_layers(model, dtype, device)
    parameters = places(model)
    shards = [
        shards_under(model, parameters, one, tensor_of_rows=most, moves=moves) for one in under
    ]
    holders = Holders.of(shards[-1], world.mesh.rank, groups, shapes_of(parameters))
    source = weights(recipe.model, recipe.seed, model, checkpoint)
    zero = deepspeed_config(recipe, holders.zero.size, loader.passes)
    partition = None if moves else partitioner(zero, holders)
    fill(model, parameters, dtype, source, holders, partition)
    divide_matrices(model, worlds, holders, moves=moves)  # tensor parallelism
    model.train()
    recompute, offload = save_memory(model, recipe.memory, world.stages)

    # What is trained: embedding, layers and head, and the objective that calls them.
    asked, stored = recipe.memory.loss_tile_tokens, None if moves else under[-1].layout
    tile = None if asked == "none" else int(asked)
    parts = CausalModel(model, tile, stored, recompute, offload=offload)
    objective = make_objective(recipe.training.objective, config)
    engine: Engine
    module: LossModule = TrainedModel(parts, objective)
    staged = {}  # by the number of stages: this rank's stages as one module, and their pipeline
    for one in under:
        if one.stages and one.layout.pipeline not in staged:
            tied = None if moves else holders
            staged[one.layout.pipeline] = pipelined(parts, objective, one, groups, tied)
    if moves:
        hosts = [groups.host_of(rank) for rank in range(world.layout.ranks)]
        engine = MovingEngine(module, recipe, holders, shards, device, staged=staged, hosts=hosts)
    else:
        module, pipeline = staged.get(world.layout.pipeline, (module, None))
        options = recipe.optimizer
        engine = ZeroEngine(
            module, zero, options, holders, device, pipeline=pipeline, switches=len(worlds) > 1
        )
    if checkpoint:
        load_state(engine, checkpoint, loader.empty())
    return Run(job, groups, world, loader, evaluation, model, engine, config, checkpoint, refused)
