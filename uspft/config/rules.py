"""Rules between keys that need no world size and no model.

What a rule finds is told only where the keys that it has read are free of faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
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
from uspft.config.messages import as_written
from uspft.config.problems import Finding, join
from uspft.config.recipe import Recipe
from uspft.config.strategies import one_layout, rising, switchable
from uspft.config.types import RecipeBlock


def broken(recipe: Recipe, faulty: Set[str]) -> list[Finding]:
    """Return what the rules find by sound keys: where one of those that a rule has read is faulty,
    what it finds from there on would only repeat that fault."""
    found: list[Finding] = []
    for rule in RULES:
        read: set[str] = set()
        for finding in rule(cast(Recipe, _Noted(recipe, "", read))):
            if any(touches(key, bad) for key in read for bad in faulty):
                break
            found.append(finding)
    return found


class _Noted:
    """A block of a recipe that notes the path of each key that a rule reads."""

    def __init__(self, block: RecipeBlock, at: str, read: set[str]) -> None:
        self._block, self._at, self._read = block, at, read

    def __getattr__(self, name: str) -> Any:
        own = getattr(type(self._block), name, None)
        if isinstance(own, property):  # it reads keys too
            return own.fget(self)  # type: ignore[misc]
        return _noted(getattr(self._block, name), join(self._at, name), self._read)


class _NotedKeys(dict[str, Any]):
    """A mapping that notes which of its keys are asked for, or itself where all are."""

    def __init__(self, values: dict[str, Any], at: str, read: set[str]) -> None:
        super().__init__(values)
        self._at, self._read = at, read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(join(self._at, key))
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read.add(self._at)
        return super().__iter__()


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
    """Return whether two keys are one, or one of them lies inside the other."""
    return key == bad or key.startswith(f"{bad}.") or bad.startswith((f"{key}.", f"{key}["))


def _one_model(recipe: Recipe) -> Iterator[Finding]:
    name, config = recipe.model.name_or_path, recipe.model.config
    if name is not None and config is not None:
        what = "stands beside `model.name_or_path`, and only one of them names the model"
        yield "model.config", what, "keep one and write null for the other"
    if name is None and config is None:
        what = "is missing, and so is `model.config`"
        yield "model.name_or_path", what, "write a Hugging Face folder or hub id, or model.config"


def _new_tokens(recipe: Recipe) -> Iterator[Finding]:
    tokens = recipe.model.add_tokens
    if tokens and recipe.model.adapter:
        what = "stands beside `model.adapter`, which does not train the rows of new tokens"
        yield "model.add_tokens", what, "leave one of them out"
    for number, token in enumerate(tokens):
        if token in tokens[:number]:
            yield f"model.add_tokens[{number}]", f"`{token}` stands there twice", "write it once"


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
    peak = recipe.optimizer.learning_rate
    for key in ("min_learning_rate", "warmup_initial"):
        lowest = getattr(recipe.lr_schedule, key)
        if lowest > peak:
            what = f"is {lowest:g}, above optimizer.learning_rate: {peak:g}"
            yield f"lr_schedule.{key}", what, f"write at most {peak:g}"


_OF_SCHEDULE = {"cycles": "cosine_restarts", "power": "polynomial", "decay_ratio": "wsd"}
"""Keys of `lr_schedule` that one of its types alone has."""


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what shapes another schedule, and a fall that begins inside the warm-up."""
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
    for key in ("eval_every_steps", "eval_micro_batch_size"):
        value = getattr(recipe.training, key)
        if value is not None and not (recipe.data.eval or recipe.data.eval_fraction):
            what = f"is {value}, and there is no `data.eval`"
            yield f"training.{key}", what, "write data.eval or data.eval_fraction, or null here"


def _restarts(recipe: Recipe) -> Iterator[Finding]:
    """Refuse hosts to start again on where nothing starts again."""
    hosts = recipe.launch.min_hosts
    if hosts is not None and not recipe.launch.restarts:
        what = f"is {hosts}, and with launch.restarts 0 a run never starts again"
        yield "launch.min_hosts", what, "write launch.restarts too, or null here"


def _least_loss(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what compares evaluations where there are none to compare."""
    for key, value, off in (
        ("training.patience", recipe.training.patience, "null"),
        ("checkpoint.keep_best", recipe.checkpoint.keep_best or None, "false"),
    ):
        if value is None:
            continue
        what = f"is {as_written(value)}, and"
        if not (recipe.data.eval or recipe.data.eval_fraction):
            what = f"{what} there is nothing to evaluate on"
            remedy = f"write data.eval or data.eval_fraction, or {off} here"
            yield key, what, remedy
        elif recipe.training.eval_every_steps is None:
            what = f"{what} the only evaluation is that of the last step"
            yield key, what, f"write training.eval_every_steps, such as 100, or {off} here"


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
    if recipe.launch.device == "cpu":
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


def _grouped(recipe: Recipe) -> Iterator[Finding]:
    """Refuse to remember what lies between exchanges of heads, where each group has its own."""
    memory = recipe.memory
    if memory.heads_at_once and memory.recompute == "exchange":
        what = f"is exchange, and memory.attention_heads is {memory.attention_heads}: "
        what += "each group of heads is exchanged again in the backward"
        yield "memory.recompute", what, f"write {AUTO}, nothing or attention"


def _reduced(recipe: Recipe) -> Iterator[Finding]:
    """Refuse to send gradients in a type that is not theirs."""
    if recipe.memory.gradient_reduction == "bfloat16" != recipe.model.dtype:
        what = f"is bfloat16, and model.dtype is {recipe.model.dtype}"
        yield "memory.gradient_reduction", what, "write float32, or model.dtype: bfloat16"


RULES = (
    own_options,
    _one_model,
    _new_tokens,
    _one_length,
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
