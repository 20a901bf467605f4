"""Rules between keys that need no world size and no model.

A rule is asked only where the keys that it reads are free of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from uspft.config.algorithms import AUTO, CONTEXT, MESH_OPTIONS, TENSOR, every_option
from uspft.config.expert_rules import experts
from uspft.config.layout_rules import algorithm, own_options, tensor_options, ulysses_degree
from uspft.config.pipeline_rules import checkpointed, stages
from uspft.config.problems import Finding
from uspft.config.recipe import Recipe
from uspft.config.strategy_rules import one_layout, rising, switchable


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
        if not any(touches(key, bad) for key in rule.reads for bad in faulty)
        for finding in rule.check(recipe)
    ]


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
        what = f"is {str(value).lower()}, and"
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


def _degrees(*keys: str) -> tuple[str, ...]:
    """Return the keys of `parallel_config`, and those of every strategy, which stand in one."""
    return (*(f"parallel_config.{key}" for key in keys), "parallel_config.strategies")


RULES = (
    KeyRule(
        _degrees(
            "context_parallel_algo",
            "tensor_parallel_algo",
            *sorted(every_option(CONTEXT)),
            *sorted(every_option(TENSOR)),
        ),
        own_options,
    ),
    KeyRule(("model.name_or_path", "model.config"), _one_model),
    KeyRule(("model.add_tokens", "model.adapter"), _new_tokens),
    KeyRule(("training.steps", "training.epochs"), _one_length),
    KeyRule(("lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"), _one_warmup),
    KeyRule(
        ("lr_schedule.min_learning_rate", "lr_schedule.warmup_initial", "optimizer.learning_rate"),
        _learning_rates,
    ),
    KeyRule(("lr_schedule",), _schedule),
    KeyRule(("training.stop_step", "training.steps"), _last_step),
    KeyRule(
        _degrees("context_parallel", "context_parallel_algo", "tensor_parallel_algo"), algorithm
    ),
    KeyRule(
        _degrees(
            "model_parallel", "use_seq_parallel", "tensor_parallel_algo", *sorted(MESH_OPTIONS)
        ),
        tensor_options,
    ),
    KeyRule(
        _degrees(
            "context_parallel",
            "context_parallel_algo",
            "ulysses_degree_in_cp",
            "model_parallel",
            "tensor_parallel_algo",
            "tensor_mesh",
        ),
        ulysses_degree,
    ),
    KeyRule(("parallel_config.strategies", "data.sequence_length"), rising),
    KeyRule(("parallel_config", "deepspeed.zero_optimization"), stages),
    KeyRule(
        (
            "parallel_config.expert_parallel",
            "parallel_config.switching",
            "deepspeed.zero_optimization",
        ),
        experts,
    ),
    KeyRule(
        (
            "memory.gradient_checkpointing",
            "parallel_config.pipeline_stage",
            "parallel_config.pp_interleave_num",
        ),
        checkpointed,
    ),
    KeyRule(("parallel_config",), one_layout),
    KeyRule(
        (
            "parallel_config.strategies",
            "deepspeed.zero_optimization.stage",
            "memory.gradient_reduction",
        ),
        switchable,
    ),
    KeyRule(
        (
            "training.eval_every_steps",
            "training.eval_micro_batch_size",
            "data.eval",
            "data.eval_fraction",
        ),
        _evaluation,
    ),
    KeyRule(
        (
            "training.patience",
            "checkpoint.keep_best",
            "training.eval_every_steps",
            "data.eval",
            "data.eval_fraction",
        ),
        _least_loss,
    ),
    KeyRule(("launch.min_hosts", "launch.restarts"), _restarts),
    KeyRule(("data.eval",), _evaluation_sets),
    KeyRule(("data.train",), _weights),
    KeyRule(("model.dtype", "model.attention", "launch.device"), _device),
    KeyRule(
        (
            "memory.gradient_checkpointing",
            "memory.recompute",
            "memory.offload_activations",
        ),
        _recomputed,
    ),
    KeyRule(("memory.attention_heads", "memory.recompute"), _grouped),
    KeyRule(("memory.gradient_reduction", "model.dtype"), _reduced),
)
