"""The last lines that a person reads: what came out, where it is, and what to try next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from uspft.config import Recipe
from uspft.config.algorithms import CONTEXT, Splits


def summary(recipe: Recipe, target: Path, overrides: Sequence[str]) -> str:
    """Return a few lines for the end of a run that went well."""
    output = recipe.output_dir
    assert output is not None
    lines = []
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in steps if "loss" in record]
    if losses:
        tenth = max(1, len(losses) // 10)
        first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
        lines.append(f"done: loss {first:.3f} → {last:.3f} (first and last tenth of the steps)")
    if recipe.data.eval or recipe.data.eval_fraction:  # else from an earlier run
        lines += _evaluated([record for record in steps if "eval_loss" in record])
    if recipe.export.huggingface:
        lines.append(
            f"model:      {output / 'hf'}  (AutoModelForCausalLM.from_pretrained loads it)"
        )
    if recipe.model.adapter:
        lines.append(f"adapter:    {output / 'adapter'}  (PeftModel.from_pretrained loads it)")
    if recipe.checkpoint.every_steps:
        lines.append(f"checkpoint: {output / 'checkpoints'}  (more training.steps goes on from it)")
    lines.append(f"numbers:    {output / 'metrics.jsonl'}")
    gpus = torch.cuda.device_count()
    if recipe.launch.device == "cpu" and gpus:
        words, said = _on_gpus(recipe, gpus), "on this machine's GPUs:"
    else:
        words, said = _another_layout(recipe), "try next:  "
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in overrides if word.partition("=")[0] not in keys]
    lines.append(f"{said} {shlex.join(['./launch.sh', str(target), *kept, *words])}")
    return "\n".join(lines)


def _evaluated(records: list[dict[str, Any]]) -> list[str]:
    """Return a line on the first and the last evaluation, or none where no loss was finite."""
    losses = [record["eval_loss"] for record in records if record["eval_loss"] is not None]
    if not losses:
        return []
    known = f"{losses[0]:.3f} → {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
    return [f"evaluation: loss {known}"]


def _on_gpus(recipe: Recipe, gpus: int) -> list[str]:
    words = ["launch.device=cuda", f"launch.processes={gpus}", "model.dtype=bfloat16"]
    words.append("parallel_config.data_parallel=auto")
    if gpus % recipe.parallel_config.context_parallel:
        words.append("parallel_config.context_parallel=1")
    return [*words, "checkpoint.resume=never"]


def _another_layout(recipe: Recipe) -> list[str]:
    """Return overrides for the same run, split another way: its numbers should not change.

    Where rows are not split, or in several ways, they ask for twice as many steps instead.
    """
    parallel = recipe.parallel_config
    if parallel.context_parallel == 1 or parallel.strategies:
        return [f"training.steps={2 * (recipe.training.steps or 100)}"]
    others = [row for row in CONTEXT.values() if not row.ulysses_required]
    others.sort(key=lambda row: (row.splits is Splits.HEADS, row.automatic))
    other = next(row for row in others if row.name != parallel.context_parallel_algo)
    return [
        f"parallel_config.context_parallel_algo={other.name}",
        "parallel_config.ulysses_degree_in_cp=null",
        "checkpoint.resume=never",
    ]
