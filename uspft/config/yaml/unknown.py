"""The keys that each mapping of a recipe may hold, and what an unknown one was meant to be."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from uspft.config.deepspeed_fields import REMOVED
from uspft.config.messages import Node, choices, inside, meant_key, misspelt, schema_of, shown
from uspft.config.other_tools import other_tools
from uspft.config.problems import COMMAND_LINE, Finding, join
from uspft.config.recipe import Recipe
from uspft.config.yaml.document import Tree

_BY_THEMSELVES = (".fields", ".rope_scaling")  # their types say more of an unknown key
_ADAPTER = "model.adapter"
_ZERO = "deepspeed.zero_optimization"


@cache
def mappings() -> dict[str, Node]:
    """Return the keys of each mapping of a recipe with their JSON Schemas, by its path, where ""
    is the top and [] any item of a list; what a key of the model or the data may name is not there.
    """
    top, found = schema_of(Recipe), dict[str, Node]()

    def take(node: Node, at: str) -> None:
        for part in inside(node, top):
            if "items" in part:
                take(part["items"], f"{at}[]")
            elif "additionalProperties" in part and not at.endswith(_BY_THEMSELVES):
                found.setdefault(at, part["properties"])
                for key, below in part["properties"].items():
                    take(below, join(at, key))

    take(top, "")
    return found


def known_keys() -> dict[str, tuple[str, ...]]:
    """Return the names of the keys of each of these mappings."""
    return {at: tuple(keys) for at, keys in mappings().items()}


def without_nulls(tree: Tree, at: str = "") -> Tree:
    """Return the tree without the keys that the command line sets to null and that may not be.

    So a key of the recipe or of a fragment gives way to its default.
    """
    if not isinstance(tree.value, dict):
        return tree
    keys = mappings().get(at, {})
    kept = {
        key: without_nulls(child, join(at, key))
        for key, child in tree.value.items()
        if key not in keys
        or child.value is not None
        or child.where != COMMAND_LINE
        or None in choices(keys[key])
    }
    return Tree(kept, tree.where)


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
    if not isinstance(raw, dict) or pattern not in mappings():
        return raw, findings, meant
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        path = join(at, key)
        if key in mappings()[pattern]:
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
    siblings = tuple(mappings()[pattern])
    theirs = other_tools().meaning(key, pattern, value)
    if theirs is not None:
        return theirs.here, {theirs.to} - {""}
    near = misspelt(key, siblings)
    homes = [] if key in _GENERIC or (near and near.lower() == key.lower()) else _homes(key)
    if homes:
        return f"it belongs to {' or '.join(f'`{home}`' for home in homes)}", set(homes)
    if near is not None:
        return f"did you mean `{near}`?", {join(at, near)}
    return meant_key(key, siblings), set()


def _homes(key: str) -> list[str]:
    """Return the paths at which a key of this name exists, except those in lists.

    Names inside what goes to DeepSpeed as it is say nothing outside it.
    """
    return [
        join(at, key)
        for at, names in mappings().items()
        if key in names and "[]" not in at and (at in (*Recipe.model_fields, "", _ZERO, _ADAPTER))
    ]
