"""The last thing a person reads: what came out, where it is, what to try next."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from uspft.config import Recipe


def summary(recipe: Recipe, target: Path) -> str:
    """A few lines for the end of a run that went well."""
    output = recipe.output_dir
    assert output is not None
    lines = []
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in steps if "loss" in record]
    if losses:
        tenth = max(1, len(losses) // 10)
        first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
        lines.append(f"done: loss {first:.3f} → {last:.3f} (first and last tenth of the steps)")
    if recipe.export.huggingface:
        lines.append(
            f"model:      {output / 'hf'}  (AutoModelForCausalLM.from_pretrained loads it)"
        )
    if recipe.checkpoint.every_steps:
        lines.append(f"checkpoint: {output / 'checkpoints'}  (more training.steps goes on from it)")
    lines.append(f"numbers:    {output / 'metrics.jsonl'}")
    gpus = torch.cuda.device_count()
    if recipe.launch.device == "cpu" and gpus:
        lines.append(f"on this machine's GPUs: {_on_gpus(recipe, target, gpus)}")
    else:
        lines.append(f"try next:   ./launch.sh {target} {_another_layout(recipe)}")
    return "\n".join(lines)


def _on_gpus(recipe: Recipe, target: Path, gpus: int) -> str:
    words = ["launch.device=cuda", f"launch.processes={gpus}", "model.dtype=bfloat16"]
    words.append("parallel_config.data_parallel=auto")
    if gpus % recipe.parallel_config.context_parallel:
        words.append("parallel_config.context_parallel=1")
    return " ".join(["./launch.sh", str(target), *words, "checkpoint.resume=never"])


def _another_layout(recipe: Recipe) -> str:
    """The same run, split another way: its numbers should not change."""
    parallel = recipe.parallel_config
    anew = "checkpoint.resume=never"
    if parallel.context_parallel == 1:
        return f"training.steps={2 * (recipe.training.steps or 100)}"
    if parallel.context_parallel_algo == "ring_cp":
        return f"parallel_config.context_parallel_algo=ulysses_cp {anew}"
    return (
        "parallel_config.context_parallel_algo=ring_cp "
        f"parallel_config.ulysses_degree_in_cp=null {anew}"
    )
