"""READ FIRST: recipe → run, every part built in the order in which data flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.load import load_state
from uspft.checkpoint.weights import WeightsOf, weights_of
from uspft.config import Recipe
from uspft.config.problems import RunFailed
from uspft.data import training_rows
from uspft.data.loader import EMPTY, StepLoader
from uspft.engine.deepspeed_config import deepspeed_config
from uspft.engine.zero import ZeroEngine, partitioner
from uspft.evaluate import EvalSet, evaluation_sets
from uspft.job import Job
from uspft.kernels import believed_kernel
from uspft.layout import Layout, layout_of
from uspft.model.build import build_model
from uspft.model.causal import CausalLoss
from uspft.model.config import layer_windows, model_config
from uspft.model.loss import tile_tokens
from uspft.model.recompute import recompute_layers
from uspft.model.trained import choose_trained
from uspft.sequence import Heads, of_recipe
from uspft.sequence.heads import split_heads
from uspft.world import World, make_world


@dataclass(frozen=True)
class Run:
    """Every part of a run, alive."""

    job: Job
    world: World
    loader: StepLoader
    evaluation: list[EvalSet]
    engine: ZeroEngine
    config: Any
    first_step: int
    refused: list[str]
    """A line for each attention kernel that is installed and was tried before the one in use."""


def assemble(job: Job, device: torch.device, weights: WeightsOf = weights_of) -> Run:
    """Build a run on this rank; collective. torch.distributed and DeepSpeed are already up."""
    _same_job(job)
    recipe = job.recipe
    config = model_config(recipe.model, recipe.data.sequence_length)
    dtype = getattr(torch, recipe.model.dtype)
    layout = this_layout(recipe)

    shapes, softcap = _head_shapes(config, layout), getattr(config, "attn_logit_softcapping", None)
    wish = recipe.model.attention
    kernel, refused = believed_kernel(
        wish, shapes, dtype, device, softcap, said_by_all=_said_by_all
    )
    windows = set(layer_windows(config))
    window = windows.pop() if len(windows) == 1 else None
    world = make_world(layout, of_recipe(recipe, layout, window), kernel, device)

    loader = make_loader(job, world)

    checkpoint = Checkpoint.read(job.resume_from) if job.resume_from else None
    model = build_model(
        config,
        dtype,
        lambda empty: weights(recipe.model, recipe.seed, empty, checkpoint),
        fill=world.mesh.rank == 0,
        partition=partitioner(deepspeed_config(recipe, layout)),
        prepare=lambda empty: choose_trained(empty, recipe.model, recipe.seed),
    )
    if recipe.memory.gradient_checkpointing:
        recompute_layers(model)
    tile = tile_tokens(recipe.memory.loss_tile_tokens, config.vocab_size)

    engine = ZeroEngine(CausalLoss(model, tile), recipe, world)
    if checkpoint:
        empty = loader.batch([EMPTY] * recipe.training.micro_batch_size)
        load_state(engine, checkpoint, empty)
    first_step = checkpoint.step if checkpoint else 0
    evaluation = evaluation_sets(job, world)
    return Run(job, world, loader, evaluation, engine, config, first_step, refused)


def _said_by_all(mine: str) -> list[str]:
    """What every rank says, by rank; collective."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def _same_job(job: Job) -> None:
    """Every rank must run the same thing: hosts may differ in files, overrides or versions."""
    if len(set(_said_by_all(f"{job.fingerprint():x}"))) > 1:
        raise RunFailed(
            f"this host and another run different things (here {job.fingerprint():x}): recipe, "
            f"overrides, data ({job.corpus.name}), steps ({job.steps}) or checkpoint "
            f"({job.resume_from}) differ"
        )


def this_layout(recipe: Recipe) -> Layout:
    """The layout of a resolved recipe."""
    layout = layout_of(recipe.parallel_config, None)
    assert isinstance(layout, Layout)  # the check before the run has refused everything else
    return layout


def make_loader(job: Job, world: World) -> StepLoader:
    """The rows of the run; with `epochs`, they end with the last one."""
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


def _head_shapes(config: Any, layout: Layout) -> list[Heads]:
    """The heads of every rank's attention calls: all ranks try all, and choose the same kernel."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, kv = config.num_attention_heads, config.num_key_value_heads
    calls = split_heads(query, kv, layout.ulysses).calls(query // kv)
    return [Heads(*call, dim) for call in sorted(calls)]
