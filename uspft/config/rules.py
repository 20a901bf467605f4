"""Rules between keys that need no world size and no model.

A rule is asked only where the keys that it reads are free of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from uspft.config.algorithms import (
    AUTO,
    CONTEXT,
    ON_A_MESH,
    TENSOR,
    Splits,
    every_option,
    having,
    names,
)
from uspft.config.problems import Finding
from uspft.config.recipe import Recipe


@dataclass(frozen=True)
class KeyRule:
    """A rule and the keys that it reads: where one is faulty, it would only repeat that fault."""

    reads: tuple[str, ...]
    check: Callable[[Recipe], Iterator[Finding]]


def broken(recipe: Recipe, faulty: Set[str]) -> list[Finding]:
    """Return what the rules find, without the rules that read a faulty key."""
    return [
        finding
        for rule in RULES
        if not any(_touches(key, bad) for key in rule.reads for bad in faulty)
        for finding in rule.check(recipe)
    ]


def _touches(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith((f"{key}.", f"{key}["))


def _one_model(recipe: Recipe) -> Iterator[Finding]:
    name, config = recipe.model.name_or_path, recipe.model.config
    if name is not None and config is not None:
        what = "stands beside `model.name_or_path`, and only one of them names the model"
        yield "model.config", what, "keep one and write null for the other"
    if name is None and config is None:
        what = "is missing, and so is `model.config`"
        yield "model.name_or_path", what, "write a Hugging Face folder or hub id, or model.config"


def _one_length(recipe: Recipe) -> Iterator[Finding]:
    steps, epochs = recipe.training.steps, recipe.training.epochs
    if steps is not None and epochs is not None:
        what = "stands beside `training.steps`, and only one of them ends the run"
        yield "training.epochs", what, "keep one and write null for the other"
    if steps is None and epochs is None:
        what = "is missing, and so is `training.epochs`"
        yield "training.steps", what, "write one of them, such as steps: 1000"


def _one_warmup(recipe: Recipe) -> Iterator[Finding]:
    ratio, steps = recipe.lr_schedule.warmup_ratio, recipe.lr_schedule.warmup_steps
    if ratio is not None and steps is not None:
        what = "stands beside `lr_schedule.warmup_ratio`, and only one of them can rule"
        yield "lr_schedule.warmup_steps", what, "keep one and write null for the other"
    if ratio is None and steps is None:
        what = "is null, and so is `lr_schedule.warmup_steps`"
        yield "lr_schedule.warmup_ratio", what, "write 0.0 for no warm-up"


def _learning_rates(recipe: Recipe) -> Iterator[Finding]:
    lowest, peak = recipe.lr_schedule.min_learning_rate, recipe.optimizer.learning_rate
    if lowest > peak:
        what = f"is {lowest:g}, above optimizer.learning_rate: {peak:g}"
        yield "lr_schedule.min_learning_rate", what, f"write at most {peak:g}"


def _algorithm(recipe: Recipe) -> Iterator[Finding]:
    if recipe.parallel_config.on_a_mesh:
        return
    degree = recipe.parallel_config.context_parallel
    if degree > 1 and recipe.parallel_config.context_parallel_algo is None:
        what = f"is missing, and context_parallel is {degree}"
        yield "parallel_config.context_parallel_algo", what, f"write {names(CONTEXT)}"


def _tensor_options(recipe: Recipe) -> Iterator[Finding]:
    parallel = recipe.parallel_config
    degree, name, mesh = parallel.model_parallel, parallel.tensor_parallel_algo, "tensor_mesh"
    if parallel.use_seq_parallel and parallel.on_a_mesh:
        what = f"is true, and {name} splits tokens between matrices already, over mesh rows"
        yield "parallel_config.use_seq_parallel", what, "write false, or leave it out"
    elif parallel.use_seq_parallel and degree == 1:
        what = "is true, and model_parallel is 1: no matrix is split, and no tokens between them"
        remedy = "write false, or model_parallel above 1"
        yield "parallel_config.use_seq_parallel", what, remedy
    if isinstance(parallel.tensor_mesh, tuple) and mesh in TENSOR[name].options:
        rows, columns = parallel.tensor_mesh
        if rows * columns != degree:
            shapes = [f"[{r}, {degree // r}]" for r in range(1, degree + 1) if degree % r == 0]
            what = f"is [{rows}, {columns}], {rows * columns} ranks, and model_parallel is {degree}"
            yield f"parallel_config.{mesh}", what, f"write one of {', '.join(shapes)}, or {AUTO}"


def _ulysses_degree(recipe: Recipe) -> Iterator[Finding]:
    key = "parallel_config.ulysses_degree_in_cp"
    parallel = recipe.parallel_config
    degree, ulysses = parallel.row_ranks, parallel.ulysses_degree_in_cp
    product = f"context_parallel: {parallel.context_parallel}"
    if parallel.mesh_is_open:  # the mesh decides how many ranks share a row: so many at most
        degree = parallel.model_parallel * parallel.context_parallel
        product = f"model_parallel: {parallel.model_parallel} × {product}"
    elif parallel.mesh_rows > 1:
        product = f"{parallel.mesh_rows} mesh rows × {product}"
    algorithm = parallel.context_parallel_algo
    if degree == 1:
        return
    if algorithm == AUTO:
        if ulysses is not None:
            what = f"is {ulysses}, and context_parallel_algo: {AUTO} chooses it"
            yield key, what, "leave it out, or name the algorithm"
        return
    row = CONTEXT.get(algorithm or "")
    divisors = [d for d in range(1, min(degree, 4096) + 1) if degree % d == 0]
    fitting = f"write one of {', '.join(map(str, divisors))}"
    if ulysses is None:
        if row and row.ulysses_required:
            yield key, f"is missing, and context_parallel_algo is {algorithm}", fitting
        return
    implied = row.implied_ulysses(degree) if row else None
    if row and row.splits is Splits.HEADS and parallel.mesh_is_open:
        what = f"is {ulysses}, and with {algorithm} the mesh that is chosen decides it"
        yield key, what, "leave it out, or write tensor_mesh"
    elif implied is not None and ulysses != implied:
        what = f"is {ulysses}, and with {algorithm} it is {implied}"
        free = [other.name for other in CONTEXT.values() if other.splits is Splits.BOTH]
        yield key, what, f"leave it out, or write context_parallel_algo: {' or '.join(free)}"
    elif degree % ulysses:
        yield key, f"is {ulysses}, which does not divide {product}", fitting


def _own_options(recipe: Recipe) -> Iterator[Finding]:
    """Refuse options that only other algorithms have, instead of dropping them."""
    parallel = recipe.parallel_config
    shared = ON_A_MESH if parallel.on_a_mesh else None
    for table, name in (
        (CONTEXT, parallel.context_parallel_algo or shared),
        (TENSOR, parallel.tensor_parallel_algo),
    ):
        row = table.get(name or "")
        for option in sorted(every_option(table)):
            value = getattr(parallel, option)
            off = value in (None, AUTO) or isinstance(value, bool)
            if not off and not (row and option in row.options):
                shown = list(value) if isinstance(value, tuple) else value
                what = f"is {shown}, and only {' and '.join(having(option, table))} has it"
                yield f"parallel_config.{option}", what, f"write {AUTO}, or leave it out"


def _evaluation(recipe: Recipe) -> Iterator[Finding]:
    for key in ("eval_every_steps", "eval_micro_batch_size"):
        value = getattr(recipe.training, key)
        if value is not None and recipe.data.eval is None:
            what = f"is {value}, and there is no `data.eval`"
            yield f"training.{key}", what, "write data.eval, or null here"


def _evaluation_sets(recipe: Recipe) -> Iterator[Finding]:
    titles: list[str] = []
    for number, source in enumerate(recipe.data.eval or ()):
        if source.weight is not None:
            what = f"is {source.weight:g}, and evaluation takes each sample once"
            yield f"data.eval[{number}].weight", what, "leave it out"
        if source.title in titles:
            what = f"is `{source.title}` again, as data.eval[{titles.index(source.title)}]"
            yield f"data.eval[{number}]", what, "keep one of them"
        titles.append(source.title)


def _device(recipe: Recipe) -> Iterator[Finding]:
    if recipe.launch.device == "cpu":
        if recipe.model.dtype == "float16":
            what = "is float16, and launch.device is cpu; float16 trains on GPUs only"
            yield "model.dtype", what, "write float32 or bfloat16"
        if recipe.model.attention.startswith("flash_attn"):
            what = f"is {recipe.model.attention}, a GPU kernel, and launch.device is cpu"
            yield "model.attention", what, "write auto or torch"
    elif recipe.model.attention.startswith("flash_attn") and recipe.model.dtype == "float32":
        what = f"is {recipe.model.attention}, which has no float32, and model.dtype is float32"
        yield "model.attention", what, "write auto or torch, or dtype: bfloat16"


def _recomputed(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what asks for checkpointed layers where there are none."""
    memory = recipe.memory
    if memory.gradient_checkpointing:
        return
    for key, off in (("recompute", AUTO), ("offload_activations", "none")):
        value = getattr(memory, key)
        if value != off:
            what = f"is {value}, and memory.gradient_checkpointing is false"
            yield f"memory.{key}", what, f"write {off}, or gradient_checkpointing: true"


RULES = (
    KeyRule(
        (
            "parallel_config.context_parallel_algo",
            "parallel_config.tensor_parallel_algo",
            *(f"parallel_config.{option}" for option in sorted(every_option(CONTEXT))),
            *(f"parallel_config.{option}" for option in sorted(every_option(TENSOR))),
        ),
        _own_options,
    ),
    KeyRule(("model.name_or_path", "model.config"), _one_model),
    KeyRule(("training.steps", "training.epochs"), _one_length),
    KeyRule(("lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"), _one_warmup),
    KeyRule(("lr_schedule.min_learning_rate", "optimizer.learning_rate"), _learning_rates),
    KeyRule(
        (
            "parallel_config.context_parallel",
            "parallel_config.context_parallel_algo",
            "parallel_config.tensor_parallel_algo",
        ),
        _algorithm,
    ),
    KeyRule(
        (
            "parallel_config.model_parallel",
            "parallel_config.use_seq_parallel",
            "parallel_config.tensor_parallel_algo",
            "parallel_config.tensor_mesh",
        ),
        _tensor_options,
    ),
    KeyRule(
        (
            "parallel_config.context_parallel",
            "parallel_config.context_parallel_algo",
            "parallel_config.ulysses_degree_in_cp",
            "parallel_config.model_parallel",
            "parallel_config.tensor_parallel_algo",
            "parallel_config.tensor_mesh",
        ),
        _ulysses_degree,
    ),
    KeyRule(
        ("training.eval_every_steps", "training.eval_micro_batch_size", "data.eval"), _evaluation
    ),
    KeyRule(("data.eval",), _evaluation_sets),
    KeyRule(("model.dtype", "model.attention", "launch.device"), _device),
    KeyRule(
        (
            "memory.gradient_checkpointing",
            "memory.recompute",
            "memory.offload_activations",
        ),
        _recomputed,
    ),
)
