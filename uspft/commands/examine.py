"""Everything that can be known about a recipe before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from uspft.commands.place import CONFIGS
from uspft.config import (
    Loaded,
    ModelShape,
    Problem,
    Recipe,
    RecipeError,
    check_length,
    load,
    read_shape,
)
from uspft.data import not_checked, source_problems
from uspft.engine.deepspeed_config import micro_batches
from uspft.layout import Layout, layout_of
from uspft.model.loss import tile_tokens
from uspft.sequence import Heads, choose

Finding = tuple[str, str, str]


@dataclass(frozen=True)
class Examined:
    """A recipe with every `auto` that depends on this machine resolved, and its layout."""

    loaded: Loaded
    recipe: Recipe
    layout: Layout
    shape: ModelShape | None
    not_checked: list[str] = field(default_factory=list)

    def problem(self, finding: Finding) -> Problem:
        return self.loaded.origins.problem(*finding)


def examine(path: Path, overrides: Sequence[str], hosts: int, ranks: int | None) -> Examined:
    """Load and check a recipe; touches no device, network or folder beyond reading.

    ranks: processes of all hosts together; None: what the recipe and this machine give. Raises
    RecipeError with all problems at once.
    """
    loaded = load(path, overrides)
    recipe = loaded.recipe
    device = recipe.launch.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    findings = _files(recipe) + source_problems(recipe.data) + _precision(recipe, device)
    shape = read_shape(recipe.model, CONFIGS)
    open_questions = list(not_checked(recipe.data))
    if isinstance(shape, list):
        findings += shape
        shape = None
    elif shape is None:
        open_questions.append(
            f"the sizes of model {recipe.model.name_or_path} (not on this machine)"
        )
    if ranks is None and device == "cuda" and recipe.launch.processes == "auto":
        ranks = max(1, torch.cuda.device_count()) * hosts
    if ranks is None and recipe.launch.processes != "auto":
        ranks = int(recipe.launch.processes) * hosts
    layout = layout_of(recipe.parallel_config, ranks)
    if isinstance(layout, Layout):
        findings += _algorithm(recipe, layout, shape)
        findings += _hosts(layout, hosts) + _accumulation(recipe, layout)
        if shape:
            findings += check_length(shape, recipe.model, recipe.data.sequence_length)
    else:
        findings.append(layout)
    if findings:
        raise RecipeError([loaded.origins.problem(*finding) for finding in findings])
    assert isinstance(layout, Layout)
    resolved = _resolve(recipe, layout, hosts, device, shape)
    return Examined(loaded, resolved, layout, shape, open_questions)


def _resolve(
    recipe: Recipe, layout: Layout, hosts: int, device: str, shape: ModelShape | None
) -> Recipe:
    """The recipe with degrees, processes, device and tiles as numbers and names."""

    def block(name: str, **values: Any) -> Any:
        return getattr(recipe, name).model_copy(update=values)

    tile = recipe.memory.loss_tile_tokens
    if shape and tile == "auto":
        tile = tile_tokens(tile, shape.vocab_size) or "none"
    attention = recipe.model.attention
    if device == "cpu":
        attention = "torch"
    return recipe.model_copy(
        update={
            "parallel_config": block("parallel_config", data_parallel=layout.data),
            "launch": block("launch", processes=layout.ranks // hosts, device=device),
            "memory": block("memory", loss_tile_tokens=tile),
            "model": block("model", attention=attention),
        }
    )


def _files(recipe: Recipe) -> list[Finding]:
    """Named files that are not there."""
    found = []
    named = [("data.chat_template", recipe.data.chat_template)]
    if recipe.model.tokenizer and recipe.model.tokenizer.startswith((".", "/")):
        named.append(("model.tokenizer", recipe.model.tokenizer))
    if recipe.checkpoint.resume not in ("auto", "never"):
        named.append(("checkpoint.resume", recipe.checkpoint.resume))
    for key, name in named:
        if name and not Path(name).exists():
            found.append((key, f"`{name}` does not exist", "name a file or folder that does"))
    return found


def _precision(recipe: Recipe, device: str) -> list[Finding]:
    if device == "cpu" and recipe.model.dtype == "float16":
        return [("model.dtype", "float16 runs on GPUs only", "write bfloat16 or float32")]
    if device == "cuda" and recipe.model.dtype == "float32":
        return [
            (
                "model.dtype",
                "float32 has no flash attention on a GPU",
                "write bfloat16 or float16, or launch.device: cpu",
            )
        ]
    if device == "cpu" and recipe.model.attention.startswith("flash"):
        return [
            (
                "model.attention",
                f"{recipe.model.attention} runs on GPUs only",
                "write auto or torch",
            )
        ]
    return []


def _algorithm(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    algorithm = choose(recipe.parallel_config.context_parallel_algo, layout.ulysses, layout.ring)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim) if shape else None
    # A model that is not here is taken to have as many heads as the degree needs.
    wide = heads or Heads(layout.ulysses, layout.ulysses, 1)
    return algorithm.problems(recipe.data.sequence_length, wide)


def _hosts(layout: Layout, hosts: int) -> list[Finding]:
    if layout.ranks % hosts == 0:
        return []
    return [
        (
            "launch.processes",
            f"{layout.ranks} processes do not spread evenly over {hosts} hosts",
            "start as many on each host",
        )
    ]


def _accumulation(recipe: Recipe, layout: Layout) -> list[Finding]:
    stage = recipe.deepspeed.zero_optimization.get("stage", 1)
    passes = micro_batches(recipe, layout)
    if stage == 0 and recipe.model.dtype == "bfloat16" and passes > 1:
        return [
            (
                "deepspeed.zero_optimization.stage",
                f"stage 0 in bfloat16 would accumulate {passes} micro-batches in bfloat16",
                "write stage 1, or model.dtype float32",
            )
        ]
    return []
