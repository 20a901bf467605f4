"""The step of a recipe, as the planner takes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from uspft.config import ParallelBlock, Recipe
from uspft.config.algorithms import AUTO
from uspft.families import ModelShape, layer_windows
from uspft.planner.memory import RECOMPUTES, lora_of
from uspft.planner.step_shape import GRADIENT_BYTES, StepShape
from uspft.planner.trained import counts_of
from uspft.segments import Segments
from uspft.sequence import forwards_of


def step_shape(recipe: Recipe, model: ModelShape) -> StepShape:
    """Return the recipe's step, with rows of one document each."""
    # What the file leaves out is as transformers has it, such as how many experts a token meets.
    whole = replace(model, raw=model.full)
    counts = counts_of(whole, 1, lora_of(recipe.model), tuple(recipe.model.freeze))
    return StepShape(
        whole,
        Segments.single(recipe.data.sequence_length),
        layer_windows(whole),
        recipe.training.global_batch_size,
        recipe.training.micro_batch_size,
        stage=stage_of(recipe),
        element_bytes=4 if recipe.model.dtype == "float32" else 2,
        recompute=bool(recipe.memory.gradient_checkpointing),
        attention=forwards_of(recipe),
        overlaps=_overlaps(recipe),
        trained=counts.trained / counts.every,
        gradient_bytes=gradient_bytes(recipe),
        **matrices_of(recipe.parallel_config),
    )


def matrices_of(parallel: ParallelBlock) -> dict[str, Any]:
    """Return what a step's shape has of how a layout splits matrices, and tokens between them."""
    return {
        "use_seq_parallel": parallel.use_seq_parallel,
        "slices": slices_of(parallel),
        "copies": parallel.fine_grain_interleave,
    }


def slices_of(parallel: ParallelBlock) -> tuple[int, ...] | None:
    """Return the slices of each product that a recipe asks for, or None where it leaves them."""
    asked = parallel.tensor_slices
    if isinstance(asked, int):
        return (asked,) * 4
    return asked if isinstance(asked, tuple) else None


def gradient_bytes(recipe: Recipe) -> int:
    """Return the bytes of an element of the gradients that cross ranks."""
    return 2 if recipe.memory.gradient_reduction == "bfloat16" else GRADIENT_BYTES


def recomputes_of(recipe: Recipe, device: str) -> Collection[str]:
    """Return what of attention a recipe lets be made again on a device: `auto` stands for all
    choices, but on CPUs for none."""
    asked, again = recipe.memory.recompute, recipe.memory.gradient_checkpointing
    if asked == AUTO and again and device != "cpu":
        return RECOMPUTES
    return {asked if asked in RECOMPUTES else RECOMPUTES[0]}


def stage_of(recipe: Recipe) -> int:
    return int(recipe.deepspeed.zero_optimization.get("stage", 1))


def _overlaps(recipe: Recipe) -> bool | None:
    """Return DeepSpeed's overlap_comm; None where the recipe leaves it out.

    On a CPU nothing overlaps: DeepSpeed does it by streams, and there are none.
    """
    if recipe.launch.device == "cpu":
        return False
    asked = recipe.deepspeed.zero_optimization.get("overlap_comm")
    return None if asked is None else bool(asked)
