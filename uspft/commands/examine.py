"""Everything that can be known about a recipe before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from uspft.batch import Segments
from uspft.commands.examine_files import file_findings, in_the_way
from uspft.commands.place import CONFIGS
from uspft.commands.sizes import with_scaling, with_tiles
from uspft.config import (
    Finding,
    InputError,
    Loaded,
    ModelShape,
    Problem,
    Recipe,
    RecipeError,
    check_length,
    load,
    read_shape,
)
from uspft.config.blocks import ParallelBlock
from uspft.data import not_checked, source_problems
from uspft.engine.deepspeed_config import micro_batches
from uspft.layout import Layout, layout_of
from uspft.sequence import Heads, of_recipe
from uspft.sequence.auto import Work, recommend


@dataclass(frozen=True)
class Examined:
    """A recipe with every `auto` that depends on this machine resolved, and its layout."""

    loaded: Loaded
    recipe: Recipe
    layout: Layout
    shape: ModelShape | None
    not_checked: list[str] = field(default_factory=list)
    why: str | None = None
    """What `context_parallel_algo: auto` became, and the reason."""

    @property
    def sentence(self) -> str:
        """Layout, ZeRO stage and compute type, for a person."""
        stage = self.recipe.deepspeed.zero_optimization.get("stage", 1)
        layout = self.layout.sentence(self.recipe.parallel_config.context_parallel_algo)
        return f"{layout}; ZeRO-{stage}, {self.recipe.model.dtype} on {self.recipe.launch.device}"

    def problem(self, finding: Finding) -> Problem:
        return self.loaded.origins.problem(*finding)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """What is raised inside with findings comes out as a RecipeError, each with its place."""
        try:
            yield
        except InputError as error:
            if not error.findings:
                raise
            raise RecipeError(map(self.problem, error.findings)) from error


def examine(
    path: Path, overrides: Sequence[str], hosts: int, ranks: int | None, *, trains: bool = True
) -> Examined:
    """Load and check a recipe; touches no device, network or folder beyond reading.

    ranks: processes of all hosts together; None: what the recipe and this machine give. trains: as
    a run, which takes its output folder. Raises
    RecipeError with all problems at once.
    """
    loaded = load(path, overrides)
    recipe = loaded.recipe
    device = recipe.launch.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    findings = file_findings(recipe) + source_problems(recipe.data)
    findings += _precision(recipe, device) + (in_the_way(recipe, path) if trains else [])
    shape = read_shape(recipe.model, CONFIGS)
    open_questions = list(not_checked(recipe.data))
    tokenizer = recipe.model.tokenizer or recipe.model.name_or_path
    if tokenizer and not Path(tokenizer).is_dir():
        open_questions.append(f"the tokenizer {tokenizer} (not on this machine)")
    if isinstance(shape, list):
        findings += shape
        shape = None
    elif shape is None:
        open_questions.append(
            f"the sizes of model {recipe.model.name_or_path} (not on this machine)"
        )
    ranks = ranks or _ranks(recipe, device, hosts)
    recipe, why = _settle_algorithm(recipe, shape, (ranks or 0) // hosts, _known_work(recipe))
    layout = layout_of(recipe.parallel_config, ranks)
    if isinstance(layout, Layout):
        findings += layout_findings(recipe, layout, shape) + _hosts(layout, hosts)
        if shape:
            findings += check_length(shape, recipe.model, recipe.data.sequence_length)
    else:
        findings.append(layout)
    if findings:
        raise RecipeError([loaded.origins.problem(*finding) for finding in findings])
    assert isinstance(layout, Layout)
    resolved = _resolve(recipe, layout, hosts, device, shape)
    return Examined(loaded, resolved, layout, shape, open_questions, why)


def _ranks(recipe: Recipe, device: str, hosts: int) -> int | None:
    """Processes of all hosts together, where the recipe or this machine says."""
    if recipe.launch.processes != "auto":
        return int(recipe.launch.processes) * hosts
    here = torch.cuda.device_count() if device == "cuda" else 0
    return here * hosts or None


def with_rows(found: Examined, local: Recipe, work: Work) -> Examined:
    """What `auto` becomes where rows and layers are known; local: folders in place of hub ids."""
    asked, processes = found.loaded.recipe, found.recipe.launch.processes
    assert isinstance(processes, int)
    shape = read_shape(local.model, CONFIGS)
    known = shape if isinstance(shape, ModelShape) else None
    settled, why = _settle_algorithm(asked, known, processes, work)
    if why is None:
        return found
    layout = layout_of(settled.parallel_config, found.layout.ranks)
    assert isinstance(layout, Layout)  # as many ranks share a row as before
    parallel = _with_degrees(settled, layout)
    recipe = found.recipe.model_copy(update={"parallel_config": parallel})
    return replace(found, recipe=recipe, layout=layout, why=why)


def _known_work(recipe: Recipe) -> Work | None:
    """What rows look like before the data is read: known where each holds one sample."""
    whole = Segments.single(recipe.data.sequence_length)
    return Work([whole]) if recipe.data.packing == "none" else None


def _settle_algorithm(
    recipe: Recipe, shape: ModelShape | None, per_host: int, work: Work | None
) -> tuple[Recipe, str | None]:
    """The recipe with `context_parallel_algo: auto` replaced by what it means here, and why."""
    parallel = recipe.parallel_config
    if parallel.context_parallel_algo != "auto":
        return recipe, None
    if parallel.context_parallel == 1:
        settled = parallel.model_copy(update={"context_parallel_algo": None})
        return recipe.model_copy(update={"parallel_config": settled}), None
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim) if shape else None
    ranks = parallel.context_parallel
    if work:
        work = work._replace(keep=not recipe.memory.gradient_checkpointing)
    choice = recommend(ranks, per_host or ranks, heads, work)
    update = {
        "context_parallel_algo": choice.algorithm,
        "ulysses_degree_in_cp": choice.ulysses,
    }
    settled = parallel.model_copy(update=update)
    why = f"{choice.algorithm}: {choice.why}"
    return recipe.model_copy(update={"parallel_config": settled}), why


def _resolve(
    recipe: Recipe, layout: Layout, hosts: int, device: str, shape: ModelShape | None
) -> Recipe:
    """The recipe with degrees, processes, device and tiles as numbers and names."""

    def block(name: str, **values: Any) -> Any:
        return getattr(recipe, name).model_copy(update=values)

    if shape:
        recipe = with_scaling(with_tiles(recipe, shape.vocab_size), shape)
    attention = "torch" if device == "cpu" else recipe.model.attention
    return recipe.model_copy(
        update={
            "parallel_config": _with_degrees(recipe, layout),
            "launch": block("launch", processes=layout.ranks // hosts, device=device),
            "model": block("model", attention=attention),
        }
    )


def _with_degrees(recipe: Recipe, layout: Layout) -> ParallelBlock:
    """`parallel_config` with numbers; what does not apply is null. `exchange_stages: auto` stays:
    it cuts messages by their size, which no number says."""
    parallel = recipe.parallel_config
    exchanges = parallel.context_parallel_algo == "planned_cp" and layout.ring > 1
    degrees = {
        "data_parallel": layout.data,
        "exchange_stages": parallel.exchange_stages if exchanges else None,
        "tensor_mesh": None,
        "tensor_slices": None,
    }
    return parallel.model_copy(update=degrees)


def _precision(recipe: Recipe, device: str) -> list[Finding]:
    if recipe.model.dtype == "float16":
        what = "training in float16 is not available yet"
        return [("model.dtype", what, "write bfloat16" + (" or float32" * (device == "cpu")))]
    if device == "cuda" and recipe.model.dtype == "float32":
        return [
            (
                "model.dtype",
                "float32 has no flash attention on a GPU",
                "write bfloat16, or launch.device: cpu",
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


def layout_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """What speaks against a recipe's `parallel_config` under its layout."""
    algorithm = of_recipe(recipe, layout)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim) if shape else None
    # A model that is not here is taken to have as many heads as the degree needs.
    wide = heads or Heads(layout.ulysses, layout.ulysses, 1)
    problems = algorithm.problems(recipe.data.sequence_length, wide)
    return problems + _accumulation(recipe, layout)


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
