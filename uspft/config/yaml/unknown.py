"""The keys that each mapping of a recipe may hold, and what an unknown one was meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from uspft.config.allowed import shown
from uspft.config.checks import misspelt
from uspft.config.deepspeed_fields import (
    AIO,
    COMMS_LOGGER,
    FLOPS_PROFILER,
    LEAF_MODULE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    REMOVED,
    ZENFLOW,
    ZERO,
)
from uspft.config.other_tools import other_tools
from uspft.config.problems import Finding, join
from uspft.config.recipe import Recipe


def _nested(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the blocks that a field may hold, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for part in get_args(annotation):
        for kind, listed in _nested(part):
            yield kind, listed or getattr(annotation, "__origin__", None) is tuple


def _fields(kind: type[BaseModel], at: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield at, tuple(kind.model_fields)
    for name, field in kind.model_fields.items():
        for nested, listed in _nested(field.annotation):
            yield from _fields(nested, join(at, name) + ("[]" if listed else ""))


_ADAPTER = "model.adapter"
_ZERO = "deepspeed.zero_optimization"
# The path of a mapping that goes to DeepSpeed as it is → its keys, each with its check.
DEEPSPEED = {
    "deepspeed.aio": AIO,
    "deepspeed.comms_logger": COMMS_LOGGER,
    "deepspeed.flops_profiler": FLOPS_PROFILER,
    _ZERO: ZERO,
    f"{_ZERO}.offload_param": OFFLOAD_PARAM,
    f"{_ZERO}.offload_optimizer": OFFLOAD_OPTIMIZER,
    f"{_ZERO}.zenflow": ZENFLOW,
    f"{_ZERO}.leaf_module": LEAF_MODULE,
}
# The path of a mapping ("" is the top, [] any item of a list) → the keys it may hold.
KEYS: dict[str, tuple[str, ...]] = {
    **dict(_fields(Recipe, "")),
    **{at: tuple(checks) for at, checks in DEEPSPEED.items()},
}

# DeepSpeed's own keys that follow from the recipe → the key that rules them.
DERIVED = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "model.dtype",
    "communication_data_type": "memory.gradient_reduction",
    "seq_parallel_communication_data_type": "model.dtype",
    "optimizer": "optimizer",
    "scheduler": "lr_schedule",
    "gradient_clipping": "training.max_grad_norm",
    "prescale_gradients": "parallel_config",
    "gradient_predivide_factor": "parallel_config",
    "gradient_allreduce_op": "parallel_config",
    "sequence_parallel_size": "parallel_config.context_parallel",
    "tensor_parallel": "parallel_config.model_parallel",
    "pipeline": "parallel_config.pipeline_stage",
    "activation_checkpointing": "memory.gradient_checkpointing",
    "checkpoint": "checkpoint",
    "load_universal_checkpoint": "checkpoint.resume",
    "steps_per_print": "logging.every_steps",
    "tensorboard": "logging.tensorboard",
    "wandb": "logging.wandb",
    "csv_monitor": "logging",
    "comet": "logging",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
}

_GENERIC = ("type", "path", "name", "device", "enabled")  # say nothing about where they belong


def unknown_keys(raw: Any, at: str = "") -> tuple[Any, list[Finding], set[str]]:
    """Return the tree without unknown keys, a finding for each, and the known keys they mean."""
    pattern = re.sub(r"\[\d+\]", "[]", at)
    findings: list[Finding] = []
    meant: set[str] = set()
    if isinstance(raw, list):
        parts = [unknown_keys(item, f"{at}[{index}]") for index, item in enumerate(raw)]
        for _, more, names in parts:
            findings += more
            meant |= names
        return [item for item, _, _ in parts], findings, meant
    if not isinstance(raw, dict) or pattern not in KEYS:
        return raw, findings, meant
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        path = join(at, key)
        if key in KEYS[pattern]:
            kept[key], more, names = unknown_keys(value, path)
            findings += more
            meant |= names
            continue
        remedy, names = _meant(key, value, at, pattern)
        meant |= names
        if pattern == "deepspeed" and key in DERIVED:
            remedy = f"leave it out: `{DERIVED[key]}` rules it"
            findings.append((path, f"uspft derives `{key}`", remedy))
        elif pattern == _ZERO and key in REMOVED:
            feature, remedy = REMOVED[key]
            what = f"is {shown(value)}, and DeepSpeed has no {feature} any more"
            findings.append((path, what, remedy))
        else:
            findings.append((path, f"unknown key `{key}`", remedy))
    return kept, findings, meant


def _meant(key: str, value: Any, at: str, pattern: str) -> tuple[str, set[str]]:
    """Return what to write instead of an unknown key, and the keys that it stands for."""
    siblings = KEYS[pattern]
    theirs = other_tools().meaning(key, pattern, value)
    if theirs is not None:
        return theirs.here, {theirs.to} - {""}
    near = misspelt(key, siblings)
    homes = [] if key in _GENERIC or (near and near.lower() == key.lower()) else _homes(key)
    if homes:
        return f"it belongs to {' or '.join(f'`{home}`' for home in homes)}", set(homes)
    if near is not None:
        return f"did you mean `{near}`?", {join(at, near)}
    return f"known here: {', '.join(siblings)}", set()


def _homes(key: str) -> list[str]:
    """Return the paths at which a key of this name exists, except those in lists.

    Names inside what goes to DeepSpeed as it is say nothing outside it.
    """
    return [
        join(at, key)
        for at, names in KEYS.items()
        if key in names and "[]" not in at and (at in (*Recipe.model_fields, "", _ZERO, _ADAPTER))
    ]
