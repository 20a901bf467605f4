"""Rules between keys that need neither the world size nor the model.

A rule's findings count only where the keys that it read have no faults of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import attrgetter
from typing import Any, cast

from uspft.config.algorithms import AUTO
from uspft.config.layout_rules import (
    algorithm,
    checkpointed,
    copies,
    experts,
    own_options,
    stages,
    tensor_options,
    ulysses_degree,
)
from uspft.config.messages import as_written, refused
from uspft.config.problems import Finding, join
from uspft.config.recipe import Recipe
from uspft.config.strategies import one_layout, rising, switchable
from uspft.config.types import RecipeBlock


def broken(recipe: Recipe, faulty: Set[str]) -> list[Finding]:
    """Return the findings of all rules. A rule's findings are dropped from the point where it has
    read a faulty key, since they would repeat that fault."""
    found: list[Finding] = []
    for rule in RULES:
        read: set[str] = set()
        for finding in rule(cast(Recipe, _Noted(recipe, "", read))):
            if any(touches(key, bad) for key in read for bad in faulty):
                break
            found.append(finding)
    return found


class _Noted:
    """A proxy of a recipe's block that records the path of each key that a rule reads."""

    def __init__(self, block: RecipeBlock, at: str, read: set[str]) -> None:
        self._block, self._at, self._read = block, at, read

    def __getattr__(self, name: str) -> Any:
        own = getattr(type(self._block), name, None)
        if isinstance(own, property):  # a property reads other keys
            return own.fget(self)  # type: ignore[misc]
        return _noted(getattr(self._block, name), join(self._at, name), self._read)


class _NotedKeys(Mapping[str, Any]):
    """A proxy of a mapping that records which keys are read, or its own path if all are
    iterated."""

    def __init__(self, values: dict[str, Any], at: str, read: set[str]) -> None:
        self._values, self._at, self._read = values, at, read

    def __getitem__(self, key: str) -> Any:
        self._read.add(join(self._at, key))
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        self._read.add(self._at)
        return iter(self._values)

    def __len__(self) -> int:
        self._read.add(self._at)
        return len(self._values)


def _noted(value: Any, key: str, read: set[str]) -> Any:
    if isinstance(value, RecipeBlock):
        return _Noted(value, key, read)
    if isinstance(value, dict):
        return _NotedKeys(value, key, read)
    read.add(key)
    if isinstance(value, tuple):
        return tuple(_noted(one, f"{key}[{n}]", read) for n, one in enumerate(value))
    return value


def touches(key: str, bad: str) -> bool:
    """Return whether two key paths are equal, or one contains the other."""
    return key == bad or key.startswith(f"{bad}.") or bad.startswith((f"{key}.", f"{key}["))


_NULL = (None,)


def _one_of(
    recipe: Recipe, one: str, other: str, does: str, remedy: str = "", lacks: str = "is missing"
) -> Iterator[Finding]:
    """Require exactly one of two keys, or without a remedy for none at most one. does: the verb
    phrase of the message for both, such as `names the model`."""
    values = [attrgetter(key)(recipe) for key in (one, other)]
    if None not in values:
        what = f"is set together with `{one}`, and only one of them {does}"
        yield other, what, "keep one and write null for the other"
    if values == [None, None] and remedy:
        yield one, f"{lacks}, and so is `{other}`", remedy


def _one_model(recipe: Recipe) -> Iterator[Finding]:
    remedy = "write a Hugging Face folder or hub id, or model.config"
    return _one_of(recipe, "model.name_or_path", "model.config", "names the model", remedy)


def _new_tokens(recipe: Recipe) -> Iterator[Finding]:
    tokens = recipe.model.add_tokens
    if tokens and recipe.model.adapter:
        what = "is set together with `model.adapter`, which does not train the rows of new tokens"
        yield "model.add_tokens", what, "leave one of them out"
    for number, token in enumerate(tokens):
        if token in tokens[:number]:
            yield f"model.add_tokens[{number}]", f"`{token}` is listed twice", "write it once"


def _one_length(recipe: Recipe) -> Iterator[Finding]:
    remedy = "write one of them, such as steps: 1000"
    return _one_of(recipe, "training.steps", "training.epochs", "ends the run", remedy)


def _one_interval(recipe: Recipe) -> Iterator[Finding]:
    """Refuse an interval in steps together with one in epochs."""
    for key in ("checkpoint.every", "training.eval_every"):
        yield from _one_of(recipe, f"{key}_steps", f"{key}_epochs", "can rule")


def _one_warmup(recipe: Recipe) -> Iterator[Finding]:
    ratio, steps = "lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"
    return _one_of(recipe, ratio, steps, "can rule", "write 0.0 for no warm-up", "is null")


def _learning_rates(recipe: Recipe) -> Iterator[Finding]:
    peak = recipe.optimizer.learning_rate
    for key in ("min_learning_rate", "warmup_initial"):
        if (lowest := getattr(recipe.lr_schedule, key)) > peak:
            what = f"is {lowest:g}, above optimizer.learning_rate: {peak:g}"
            yield f"lr_schedule.{key}", what, f"write at most {peak:g}"


_OF_SCHEDULE = {"cycles": "cosine_restarts", "power": "polynomial", "decay_ratio": "wsd"}
"""Keys of `lr_schedule` that only one schedule type has."""


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    """Refuse keys of other schedule types, and a decay that would begin during the warm-up."""
    block = recipe.lr_schedule
    for key, kind in _OF_SCHEDULE.items():
        value = getattr(block, key)
        if value is not None and block.type != kind:
            what = f"is {value:g}, and lr_schedule.type is {block.type}"
            yield f"lr_schedule.{key}", what, f"leave it out, or write type: {kind}"
    falls = 0.1 if block.decay_ratio is None else block.decay_ratio
    if block.type == "wsd" and falls + (block.warmup_ratio or 0) > 1:
        what = f"is {falls:g}, and with warmup_ratio {block.warmup_ratio:g} more than all steps"
        yield "lr_schedule.decay_ratio", what, "write shares of at most 1 together"


def _last_step(recipe: Recipe) -> Iterator[Finding]:
    stop, steps = recipe.training.stop_step, recipe.training.steps
    if stop is not None and steps is not None and stop > steps:
        what = f"is {stop:,}, after the last of training.steps: {steps:,}"
        yield "training.stop_step", what, f"write at most {steps:,}, or null"


def _evaluation(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.eval is not None and recipe.data.eval_fraction is not None:
        what = f"is {recipe.data.eval_fraction:g}, and data.eval names what is evaluated on"
        yield "data.eval_fraction", what, "keep one and write null for the other"
    if not (recipe.data.eval or recipe.data.eval_fraction):
        why, remedy = (
            "and there is no `data.eval`",
            "write data.eval or data.eval_fraction, or null",
        )
        for key in ("eval_every_steps", "eval_every_epochs", "eval_micro_batch_size"):
            yield from refused(recipe, f"training.{key}", _NULL, why, f"{remedy} here")


def _restarts(recipe: Recipe) -> Iterator[Finding]:
    """Refuse `launch.min_hosts` without restarts."""
    if not recipe.launch.restarts:
        why = "and with launch.restarts 0 a run never starts again"
        remedy = "write launch.restarts too, or null here"
        yield from refused(recipe, "launch.min_hosts", _NULL, why, remedy)


def _least_loss(recipe: Recipe) -> Iterator[Finding]:
    """Refuse keys that compare evaluations where there are fewer than two."""
    if not (recipe.data.eval or recipe.data.eval_fraction):
        why, remedy = "there is nothing to evaluate on", "data.eval or data.eval_fraction"
    elif {recipe.training.eval_every_steps, recipe.training.eval_every_epochs} == {None}:
        why = "the only evaluation is that of the last step"
        remedy = "training.eval_every_steps, such as 100"
    else:
        return
    for key, off in (("training.patience", None), ("checkpoint.keep_best", False)):
        instead = f"write {remedy}, or {as_written(off)} here"
        yield from refused(recipe, key, (off,), f"and {why}", instead)


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


def _weights(recipe: Recipe) -> Iterator[Finding]:
    weights = [source.weight for source in recipe.data.train]
    if None in weights and any(weight is not None for weight in weights):
        number = weights.index(None)
        what = "is missing, and other sources have one"
        yield f"data.train[{number}].weight", what, "write one for each source, or for none"


def _device(recipe: Recipe) -> Iterator[Finding]:
    why, remedy = "", "write auto or torch"
    if recipe.launch.device == "cpu":
        why = "a GPU kernel, and launch.device is cpu"
    elif recipe.model.dtype == "float32":
        why = "which has no float32, and model.dtype is float32"
        remedy += ", or dtype: bfloat16"
    if why:
        yield from refused(recipe, "model.attention", (AUTO, "torch"), why, remedy)


def _recomputed(recipe: Recipe) -> Iterator[Finding]:
    """Refuse options of checkpointed layers where no layer is checkpointed."""
    if recipe.memory.gradient_checkpointing:
        return
    for key, off in (("memory.recompute", AUTO), ("memory.offload_activations", "none")):
        why = "and memory.gradient_checkpointing is false"
        yield from refused(
            recipe, key, (off,), why, f"write {off}, or gradient_checkpointing: true"
        )


def _grouped(recipe: Recipe) -> Iterator[Finding]:
    """Refuse `recompute: exchange` where attention works on groups of heads, whose exchanges all
    run again in the backward."""
    if recipe.memory.heads_at_once and recipe.memory.recompute == "exchange":
        what = f"is exchange, and memory.attention_heads is {recipe.memory.attention_heads}: "
        what += "each group of heads is exchanged again in the backward"
        yield "memory.recompute", what, f"write {AUTO}, nothing or attention"


def _reduced(recipe: Recipe) -> Iterator[Finding]:
    """Refuse bfloat16 gradient reduction unless the model computes in bfloat16."""
    if recipe.memory.gradient_reduction == "bfloat16" != recipe.model.dtype:
        what = f"is bfloat16, and model.dtype is {recipe.model.dtype}"
        yield "memory.gradient_reduction", what, "write float32, or model.dtype: bfloat16"


RULES = (
    own_options,
    _one_model,
    _new_tokens,
    _one_length,
    _one_interval,
    _one_warmup,
    _learning_rates,
    _schedule,
    _last_step,
    algorithm,
    tensor_options,
    ulysses_degree,
    copies,
    rising,
    stages,
    experts,
    checkpointed,
    one_layout,
    switchable,
    _evaluation,
    _least_loss,
    _restarts,
    _evaluation_sets,
    _weights,
    _device,
    _recomputed,
    _grouped,
    _reduced,
)
