"""The way from a recipe to what `plan` predicts: its step, the cluster, its own layout's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uspft.config import Fault, ParallelBlock, Recipe, load
from uspft.config.algorithms import AUTO, row_of
from uspft.model.hf_config import layer_windows
from uspft.planner.alternatives import Prediction
from uspft.planner.machine import Hardware
from uspft.planner.step import step_time
from uspft.planner.step_shape import GRADIENT_BYTES, StepShape
from uspft.prepare.cluster import cluster_of
from uspft.prepare.examine import Examined, examine
from uspft.prepare.model import examine_model
from uspft.prepare.paths import find_paths
from uspft.prepare.resolve import slices_of
from uspft.segments import Segments
from uspft.sequence import forwards_of, of_recipe


def examine_for_plan(
    target: Path, overrides: Sequence[str], hosts: int, ranks: int | None
) -> Examined:
    """Examine the recipe for the device of the hardware that it names, whatever is here."""
    loaded = load(target, overrides)
    launch = find_paths(loaded.recipe, target).recipe.launch
    if launch.device == AUTO and launch.hardware != AUTO:
        cluster, findings = cluster_of(launch.hardware, "cpu", None)
        if cluster and not findings:
            device = "cuda" if cluster.hardware.device else "cpu"
            overrides = [*overrides, f"launch.device={device}"]
    return examine(target, overrides, hosts, ranks, trains=False)


def hardware_of(found: Examined, hosts: int) -> Hardware:
    """Return the cluster's figures for as many ranks as this run puts on a host."""
    assert found.known.cluster
    return found.known.cluster.hardware.on_hosts_of(-(-found.layout.ranks // hosts))


def step_of(found: Examined) -> StepShape:
    """Return the recipe's step, with rows of one document each.

    Raises Fault where the model's config is not on this machine.
    """
    recipe, model = found.recipe, found.shape
    if model is None:
        what = f"the sizes of {recipe.model.name_or_path} are not on this machine"
        raise Fault([("model.name_or_path", what, "name its folder, or a model of configs/models")])
    examined = examine_model(found.here)
    # What the file leaves out is as transformers has it, such as how many experts a token meets.
    whole = replace(model, raw={**examined.config.to_dict(), **model.raw})
    return StepShape(
        whole,
        Segments.single(recipe.data.sequence_length),
        layer_windows(examined.config),
        recipe.training.global_batch_size,
        recipe.training.micro_batch_size,
        stage=stage_of(recipe),
        element_bytes=4 if recipe.model.dtype == "float32" else 2,
        recompute=recipe.memory.gradient_checkpointing,
        attention=forwards_of(recipe),
        overlaps=_overlaps(recipe),
        trained=examined.trained / examined.parameters,
        gradient_bytes=gradient_bytes(recipe),
        **matrices_of(recipe.parallel_config),
    )


def matrices_of(parallel: ParallelBlock) -> dict[str, Any]:
    """Return what a step's shape has of how a layout splits matrices, and tokens between them."""
    return {"use_seq_parallel": parallel.use_seq_parallel, "slices": slices_of(parallel)}


def own_layout(found: Examined, step: StepShape, hardware: Hardware) -> Prediction:
    """Return the prediction for the recipe's own layout and algorithm."""
    windows = set(step.windows)
    window = windows.pop() if len(windows) == 1 else None
    algorithm = of_recipe(found.recipe, found.layout, window)
    row = row_of(found.recipe.parallel_config.context_parallel_algo, found.layout.context)
    time = step_time(step, found.layout, algorithm, hardware)
    return Prediction(found.layout, row, time, step.slices is not None)


def gradient_bytes(recipe: Recipe) -> int:
    """Return the bytes of an element of the gradients that cross ranks."""
    return 2 if recipe.memory.gradient_reduction == "bfloat16" else GRADIENT_BYTES


def stage_of(recipe: Recipe) -> int:
    return int(recipe.deepspeed.zero_optimization.get("stage", 1))


def _overlaps(recipe: Recipe) -> bool:
    """Return DeepSpeed's overlap_comm: where it is left out, stage 3 alone overlaps.

    On a CPU nothing does: DeepSpeed overlaps by streams, and there are none.
    """
    if recipe.launch.device == "cpu":
        return False
    asked = recipe.deepspeed.zero_optimization.get("overlap_comm")
    return stage_of(recipe) == 3 if asked is None else bool(asked)
