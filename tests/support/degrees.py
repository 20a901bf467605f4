"""Runs whose rows divide matrices over more ranks than hold them: which there are, and their steps.

A step is of seven rows: some under tensor 4, some under tensor 2, and some whole where each rank
holds all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import peft_adapter
from tests.support.dropout import written_out_dropout
from tests.support.models import Documents, Reference, gradients_off, mismatch, reference
from tests.support.pairwise import pairwise
from tests.support.runs import GROUPS, close, held, prepared, small_recipe
from tests.support.stages import FULLY, ZERO
from uspft.comm import Books
from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.sequence import make_algorithm
from uspft.tensor.megatron import Megatron
from uspft.world import World

ROW, STEPS, RATE, CLIP, SEED = 40, 2, 1e-3, 0.5, 7
ROWS_PER_STEP = 7
RANK, ALPHA, DROPOUT = 4, 6.0, 0.4
TRAINS = ("all", "adapter", "norms")
"""What trains; of all parameters norms have too small gradients to show in their norm."""
NO_NORM = "^(?!.*norm)"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "heads": 8, "kv_heads": 2},
    "qwen2": {"kind": "qwen2", "heads": 4, "kv_heads": 1},
    "qwen3": {"kind": "qwen3", "heads": 8, "kv_heads": 2},
    "phi3": {"kind": "phi3", "heads": 8, "kv_heads": 2},
    "olmo2": {"kind": "olmo2", "heads": 8, "kv_heads": 2},
    "gemma2": {"kind": "gemma2", "heads": 4, "kv_heads": 2},
    "gemma3_text": {"kind": "gemma3_text", "heads": 8, "kv_heads": 4},
    "qwen3_5_text": {
        "kind": "qwen3_5_text",
        "heads": 8,
        "kv_heads": 2,
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 10,
    },
}
"""On 4 ranks most have fewer key-value heads, and one of them on 2. The heads of layers
with a state do not divide."""
TURNS: dict[int, list[tuple[Layout, list[list[int]]]]] = {
    1: [
        (Layout(mesh_columns=4), [[0]]),
        (Layout(mesh_columns=2, data=2), [[1, 2]]),
        (Layout(data=4), [[3, 4, 5, 6]]),
    ],
    2: [
        (Layout(mesh_columns=2, data=2), [[0, 1], [2, 3]]),
        (Layout(mesh_columns=4), [[4]]),
        (Layout(mesh_columns=2, ring=2), [[5]]),
        (Layout(mesh_columns=4), [[6]]),
    ],
}
"""By the degree that matrices are held at: layouts, and the rows of each pass by replica."""


@dataclass(frozen=True)
class Case:
    """One run. tokens: whether tensor ranks split them between blocks."""

    model: str
    held: int
    zero: str
    tokens: bool = False
    checkpointed: bool = False
    trains: str = "all"


def cases(*, full: bool = False) -> list[Case]:
    """Every model at a degree by turns, its traits those that were met least; full: every pair."""
    factors = tuple(FULLY), (False, True), (False, True), TRAINS
    if full:
        return [Case(*case) for case in pairwise(tuple(MODELS), tuple(TURNS), *factors)]
    met: Counter[Any] = Counter()
    found = []
    for model, degree in zip(MODELS, cycle(TURNS), strict=False):

        def often(traits: tuple[Any, ...], degree: int = degree) -> int:
            named = list(enumerate(traits))
            pairs = [(one, other) for one in named for other in named if one < other]
            return sum(10 * met[one] for one in named) + sum(
                met[pair] for pair in [*pairs, *((degree, one) for one in named)]
            )

        best = min(product(*factors), key=often)
        named = list(enumerate(best))
        met.update(named)
        met.update((one, other) for one in named for other in named if one < other)
        met.update((degree, one) for one in named)
        found.append(Case(model, degree, *best))
    return found


def recipe(case: Case, folder: Path, data: Documents) -> dict[str, Any]:
    """The recipe of a case, whose own layout is the one that holds the matrices."""
    adapter = {"type": "lora", "rank": RANK, "alpha": ALPHA, "dropout": DROPOUT}
    trained = {"all": {}, "adapter": {"adapter": adapter}, "norms": {"freeze": [NO_NORM]}}
    parallel = {"model_parallel": case.held, "use_seq_parallel": case.tokens and case.held > 1}
    return {"seed": SEED} | small_recipe(
        folder / case.model,
        data.path,
        ROW,
        model=trained[case.trains],
        parallel_config=parallel,
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={"steps": STEPS, "global_batch_size": ROWS_PER_STEP, "max_grad_norm": CLIP},
        memory={"gradient_checkpointing": case.checkpointed},
    )


def world_of(layout: Layout, case: Case, like: World) -> World:
    """A layout made live beside a run's own."""
    row = CONTEXT["ring_cp"] if layout.ring > 1 else WHOLE
    algorithm = make_algorithm(row, layout.ulysses, layout.ring, keep=False)
    tensor = Megatron(layout.tensor, splits_tokens=case.tokens)
    return World(
        make_mesh(layout, GROUPS, Books()), row, algorithm, tensor, like.kernel, like.device
    )


def train(case: Case, folder: Path, data: Documents, output: Path, *, steps: int = STEPS) -> Any:
    """The records of a case's steps, what its weights become, and Adam's mean of gradients."""
    from uspft.data.rows.loader import StepLoader
    from uspft.training.meter import Meter

    run = prepared(recipe(case, folder, data), output, tensor_of_rows=4)
    turns = [(world_of(layout, case, run.world), rows) for layout, rows in TURNS[case.held]]
    loaders = {
        world.name: StepLoader(
            run.loader.stream,
            world,
            row_tokens=ROW,
            rows_per_step=ROWS_PER_STEP,
            rows_per_batch=1,
        )
        for world, _ in turns
    }
    with pytest.MonkeyPatch.context() as patch:  # a device's peak, of which MFU is FLOPs
        patch.setattr("uspft.training.meter.peak_flops", lambda device: 1.0)
        meter = Meter(run)
    records = []
    for step in range(steps):
        batches = [
            loaders[world.name].batch([step * ROWS_PER_STEP + rows[world.replica]])
            for world, passes in turns
            for rows in passes
        ]
        run.loader.require_same_rows(batches)
        run.loader.require_shares(batches)
        result = run.engine.step(batches, RATE, stop=False)
        record = meter.record(step + 1, batches, result, 1.0)
        records.append({**record, "learning_rate": RATE})
    answer = records, held(run.engine), held(run.engine, "exp_avg")
    close(run)
    return answer


def wrong_of(got: Any, want: Reference) -> list[str]:
    """What differs of losses, norms, weights and the gradients themselves."""
    records, end, moments = got
    found = mismatch((records, {name: end[name] for name in want.end}), want)
    return found + gradients_off(moments, want)


def wanted(case: Any, setting: tuple[Path, Documents], *, steps: int = STEPS) -> Reference:
    """The same steps of one process, with plain peft where there is an adapter.

    case: has the model's name and what trains.
    """
    from uspft.model.adapter import AdapterStart

    folder, data = setting
    every = [[document] for document in data.documents]
    rows = [data.documents[i * ROWS_PER_STEP : (i + 1) * ROWS_PER_STEP] for i in range(steps)]
    no_base: Any = None
    adapter = peft_adapter(
        AdapterStart(no_base, SEED).read,
        masks=written_out_dropout(every, ROW, DROPOUT, SEED),
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
    )
    prepare = {"all": None, "adapter": adapter, "norms": norms_alone}[case.trains]
    return reference(folder / case.model, rows, rate=RATE, clip=CLIP, prepare=prepare)


def norms_alone(net: Any) -> dict[str, Any]:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("norm" in name)
    return {name: p for name, p in net.named_parameters() if p.requires_grad}
