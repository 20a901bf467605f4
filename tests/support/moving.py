"""Runs whose weights move between layouts: which there are, and their steps.

A step is of seven rows under layouts of three tensor degrees, or of two with copies of each part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.degrees import (
    ALPHA,
    CLIP,
    DROPOUT,
    MODELS,
    NO_NORM,
    RANK,
    RATE,
    ROW,
    ROWS_PER_STEP,
    SEED,
    STEPS,
)
from tests.support.models import Documents
from tests.support.runs import GROUPS, held, job_of, small_recipe
from uspft.comm import Books
from uspft.config.algorithms import CAUSAL, CONTEXT, WHOLE
from uspft.kernels.plain import TorchCapped
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.sequence import make_algorithm
from uspft.tensor.megatron import Megatron
from uspft.world import World

MOVED: dict[str, dict[str, Any]] = {
    **MODELS,
    "tied": {"kind": "llama", "heads": 8, "kv_heads": 2, "tie_word_embeddings": True},
}
PASSES: dict[str, list[tuple[Layout, list[list[int]]]]] = {
    "tensor 4": [
        (Layout(mesh_columns=4), [[0]]),
        (Layout(mesh_columns=2, ring=2), [[1]]),
        (Layout(ring=2, data=2), [[2, 3]]),
        (Layout(mesh_columns=2, data=2), [[4, 5]]),
        (Layout(mesh_columns=4), [[6]]),
    ],
    "tensor 2": [
        (Layout(data=4), [[0, 1, 2, 3]]),
        (Layout(mesh_columns=2, data=2), [[4, 5]]),
        (Layout(mesh_columns=2, ring=2), [[6]]),
    ],
}
"""By the most sharded: layouts, and the rows of each pass by replica."""


@dataclass(frozen=True)
class Moving:
    """One run. home: of PASSES. tokens: whether tensor ranks split them between blocks."""

    model: str
    home: str = "tensor 4"
    straight: bool = False
    tokens: bool = False
    checkpointed: bool = False
    trains: str = "all"
    dtype: str = "float32"
    hosts: tuple[int, ...] | None = None


def recipe(case: Moving, folder: Path, data: Documents, steps: int = STEPS) -> dict[str, Any]:
    adapter = {"type": "lora", "rank": RANK, "alpha": ALPHA, "dropout": DROPOUT}
    trained = {"all": {}, "adapter": {"adapter": adapter}, "norms": {"freeze": [NO_NORM]}}
    return {"seed": SEED} | small_recipe(
        folder / case.model,
        data.path,
        ROW,
        model={"dtype": case.dtype, **trained[case.trains]},
        training={"steps": steps, "global_batch_size": ROWS_PER_STEP, "max_grad_norm": CLIP},
        memory={"gradient_checkpointing": case.checkpointed},
    )


@dataclass
class Started:
    """An engine on this rank, with what its steps take."""

    engine: Any
    config: Any
    every: list[Any]
    """Who holds what under each layout."""
    loaders: list[tuple[Any, World, list[list[int]]]]
    first_step: int

    def batches(self, step: int) -> list[Any]:
        first = step * ROWS_PER_STEP
        return [
            loader.batch([first + rows[world.replica]])
            for loader, world, passes in self.loaders
            for rows in passes
        ]

    def step(self, step: int) -> dict[str, Any]:
        result = self.engine.step(self.batches(step), RATE, stop=False)
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "target_tokens": result.counts["target_tokens"],
            "learning_rate": RATE,
            "seconds": result.seconds,
            "switch_seconds": result.switch_seconds,
        }


def world_of(layout: Layout, tokens: bool, softcap: float | None) -> World:
    row = CONTEXT["ring_cp"] if layout.ring > 1 else WHOLE
    algorithm = make_algorithm(row, layout.ulysses, layout.ring, keep=False)
    named = row, algorithm, Megatron(layout.tensor, splits_tokens=tokens)
    kernel = TorchCapped(softcap) if softcap else TorchCpu()
    return World(make_mesh(layout, GROUPS, Books()), *named, kernel, torch.device("cpu"))


def started(
    case: Moving,
    folder: Path,
    data: Documents,
    output: Path,
    *,
    resume: bool = False,
) -> Started:
    """An engine for a case, with the weights of its model or of the newest checkpoint."""
    from benchmarks.switching.straight import StraightEngine
    from uspft.checkpoint.folder import Checkpoint
    from uspft.checkpoint.save import load_state
    from uspft.checkpoint.weights import weights_of
    from uspft.data.rows.loader import EMPTY, StepLoader
    from uspft.data.rows.stream import training_rows
    from uspft.model.build import choose_trained, empty_model
    from uspft.model.causal import CausalModel
    from uspft.model.hf_config import model_config
    from uspft.model.parallel import shards_of, split_model
    from uspft.model.recompute import recompute_layers
    from uspft.objective import TrainedModel, make_objective
    from uspft.parameters.fill import fill
    from uspft.parameters.names import places, shapes_of
    from uspft.parameters.shards import Holders
    from uspft.switching.move.moving import MovingEngine

    job = job_of(recipe(case, folder, data), output, resume=resume)
    block, dtype = job.here.model, getattr(torch, job.here.model.dtype)
    config = model_config(block, ROW)
    cap = getattr(config, "attn_logit_softcapping", None)
    worlds = [(world_of(layout, case.tokens, cap), rows) for layout, rows in PASSES[case.home]]
    stream = training_rows(job.recipe.data, job.corpus, job.recipe.seed)
    sizes = {"row_tokens": ROW, "rows_per_step": ROWS_PER_STEP, "rows_per_batch": 1}
    loaders = [(StepLoader(stream, world, **sizes), world, rows) for world, rows in worlds]
    checkpoint = Checkpoint.known(job.resume_from) if job.resume_from else None
    model = empty_model(config, dtype)
    choose_trained(model, block, job.recipe.seed)
    every = [
        shards_of(model, places(model), world.layout, splits_tokens=case.tokens)
        for world, _ in worlds
    ]
    home = max(every, key=lambda shards: shards.layout.tensor)
    rank = worlds[0][0].mesh.rank
    holders = Holders.of(home, rank, GROUPS, shapes_of(places(model)))
    fill(
        model, places(model), dtype, weights_of(block, job.recipe.seed, model, checkpoint), holders
    )
    split_model(model, holders, moves=True)
    model.train()
    recompute = recompute_layers(model, job.here.memory, range(model.config.num_hidden_layers))
    engine = (StraightEngine if case.straight else MovingEngine)(
        TrainedModel(
            CausalModel(model, None, None, recompute), make_objective(CAUSAL.name, config)
        ),
        job.here,
        holders,
        every,
        torch.device("cpu"),
        hosts=case.hosts,
    )
    if checkpoint:
        loader, *_ = loaders[0]
        load_state(engine, checkpoint, loader.batch([EMPTY]))
    return Started(engine, config, every, loaders, checkpoint.step if checkpoint else 0)


def train(case: Moving, folder: Path, data: Documents, output: Path) -> Any:
    """The records of a case's steps, what its weights become, and Adam's mean of gradients."""
    run = started(case, folder, data, output)
    records = [run.step(step) for step in range(STEPS)]
    answer = records, held(run.engine), held(run.engine, "exp_avg")
    run.engine.close()
    return answer


def with_padding(data: Documents) -> Documents:
    """The same documents with the padding token among their tokens: its embedding stays."""
    documents = []
    for ids, labels in data.documents:
        ids = [0 if place % 7 == 3 else token for place, token in enumerate(ids)]
        documents.append(
            (
                ids,
                [
                    -100 if label == -100 else token
                    for token, label in zip(ids, labels, strict=True)
                ],
            )
        )
    lines = [json.dumps({"input_ids": ids, "labels": labels}) for ids, labels in documents]
    data.path.write_text("\n".join(lines) + "\n")
    return replace(data, documents=documents)
