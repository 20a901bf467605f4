"""A configuration of MindSpore Transformers that converts, and what is said of its keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.support.converted import converted as converted_by
from uspft.convert import Outcome

BASE: dict[str, Any] = {
    "pretrained_model_dir": "org/base",
    "runner_config": {"epochs": 2, "batch_size": 1},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-6},
    "train_dataset": {"data_loader": {"type": "HFDataLoader", "path": "a.jsonl"}},
    "model": {"model_config": {"seq_length": 4096, "compute_dtype": "bfloat16"}},
}
"""A configuration that converts."""


def with_blocks(**blocks: Any) -> dict[str, Any]:
    """BASE with blocks merged in; `config` stands for model.model_config."""
    tree = copy.deepcopy(BASE)
    tree["model"]["model_config"] |= blocks.pop("config", {})
    for name, block in blocks.items():
        if isinstance(block, dict) and isinstance(tree.get(name), dict):
            tree[name] = {**tree[name], **block}
        else:
            tree[name] = block
    return tree


def converted(folder: Path, tree: Any, ranks: int | None = None, **given: Any) -> Outcome:
    """What a configuration gives; `__` stands for a dot."""
    return converted_by(folder, tree, ranks, tool="mindspore", **given)[0]


def line_of(outcome: Outcome, key: str) -> str:
    """The one line about a key of theirs."""
    (line,) = [str(remark) for remark in outcome.remarks if remark.key == key]
    return line


STAGES = {"pipeline_stage": 4, "micro_batch_num": 8}
"""Degrees of four stages."""
