"""The last lines that a person reads: what came out, where it is, and what to try next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from uspft.checkpoint.folder import folder_of
from uspft.config import Recipe
from uspft.config.algorithms import AUTO, CONTEXT, Splits
from uspft.families.multimodal import loading_class
from uspft.metrics import Best, Journal
from uspft.prepare.host import Invocation
from uspft.prepare.output import output_of
from uspft.written import ADAPTER, METRICS, MODEL

QUICKSTART = "quickstart.yaml"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank of vLLM may be; left out, it is 16."""


def summary(
    recipe: Recipe,
    target: Path,
    overrides: Sequence[str],
    place: Invocation,
    *,
    chats: bool,
    hosts: int = 1,
) -> str:
    """Return a few lines for the end of a run that went well.

    chats: whether it trained on conversations. hosts: how many hosts it ran on.
    """
    output = output_of(recipe)
    lines = []
    steps = Journal(output / METRICS).records()
    losses = [record["loss"] for record in steps if record.get("loss") is not None]
    if losses:
        tenth = max(1, len(losses) // 10)
        first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
        lines.append(f"done: loss {first:.3f} → {last:.3f} (first and last tenth of the steps)")
    best = Best()
    if recipe.data.eval or recipe.data.eval_fraction:  # else from an earlier run
        evaluations = [record for record in steps if "eval_loss" in record]
        lines += _evaluated(evaluations)
        best = Best.of(evaluations)
        if recipe.checkpoint.keep_best and best.step is not None:
            folder = folder_of(output, best.step)
            lines.append(f"best:       step {best.step}, loss {best.loss:.3f}  ({folder})")
    if recipe.export.huggingface:
        file = output / MODEL / "config.json"
        loads = loading_class(json.loads(file.read_text("utf-8")) if file.is_file() else {})
        lines.append(f"model:      {output / MODEL}  ({loads}.from_pretrained loads it)")
    if recipe.model.adapter:
        lines.append(f"adapter:    {output / ADAPTER}  (PeftModel.from_pretrained loads it)")
    training = recipe.training
    early = training.patience is not None and best.since >= training.patience
    ends = training.stop_step or training.steps
    early = early and (ends is None or len(losses) < ends)
    if recipe.checkpoint.every_steps:
        more = "a larger training.patience" if early else "more training.steps"
        if training.stop_step and not early:
            more = "a larger training.stop_step"
        lines.append(f"checkpoint: {output / 'checkpoints'}  ({more} goes on from it)")
    lines.append(f"numbers:    {output / METRICS}")
    return "\n".join(
        [*lines, *_next(recipe, target, overrides, place, early=early, chats=chats, hosts=hosts)]
    )


def _next(
    recipe: Recipe,
    target: Path,
    overrides: Sequence[str],
    place: Invocation,
    *,
    early: bool,
    chats: bool,
    hosts: int,
) -> list[str]:
    """Return lines on what a person may do next: after the quickstart, the same run with another
    algorithm, which is its point; after other runs, what one does with a model. early: whether
    patience ended the run. chats, hosts: as of `summary`."""

    def command(words: list[str]) -> str:
        if hosts > 1:  # how it was started on all of them, each host knows a part of
            return f"started on all {hosts} hosts as this run was, with {shlex.join(words)}"
        keys = {word.partition("=")[0] for word in words}
        kept = [word for word in overrides if word.partition("=")[0] not in keys]
        return place.to_type(str(target), *kept, *words)

    gpus = torch.cuda.device_count()
    if recipe.launch.device == "cpu" and gpus:
        return [f"on this machine's GPUs: {command(_on_gpus(recipe, gpus))}"]
    if target.name == QUICKSTART and not chats:
        return [f"try next:   {command(_another_layout(recipe))}"]
    lines, output, training = [], output_of(recipe), recipe.training
    if chats and any((output / name).is_dir() for name in (MODEL, ADAPTER)):
        lines.append(f"chat:       {place.to_type('chat', str(output))}")
    if recipe.export.huggingface:
        folder = shlex.quote(str(output / MODEL))
        lines.append(f"serve:      vllm serve {folder}")
        lines.append(f"            for llama.cpp: python convert_hf_to_gguf.py {folder}")
    elif recipe.model.adapter:
        lines += _adapter_served(recipe, place)
    # What began the run anew, or from elsewhere, is not to do so once more.
    here = [] if recipe.checkpoint.resume == AUTO else [f"checkpoint.resume={AUTO}"]
    if training.patience and early:
        longer = f"training.patience={2 * training.patience}"
        lines.append(f"go on:      {command([longer, *here])}")
    elif recipe.checkpoint.every_steps:
        key, count = "epochs", training.epochs
        if training.stop_step:
            key, count = "stop_step", training.stop_step
        elif training.steps:
            key, count = "steps", training.steps
        lines.append(f"go on:      {command([f'training.{key}={2 * (count or 1)}', *here])}")
    return lines


def _adapter_served(recipe: Recipe, place: Invocation) -> list[str]:
    """Return lines on how an adapter is served that no merged model stands beside: on its base, or
    merged first, where a server would take config or template of the base and they are others."""
    model, output = recipe.model, output_of(recipe)
    assert model.adapter is not None
    own = model.rope_scaling or model.overrides or model.tokenizer or recipe.data.chat_template
    served = next((rank for rank in VLLM_RANKS if rank >= model.adapter.rank), None)
    if model.name_or_path and served and not own:
        words = ["vllm", "serve", model.name_or_path, "--enable-lora"]
        words += ["--max-lora-rank", str(served), "--lora-modules", f"tuned={output / ADAPTER}"]
        return [f"serve:      {shlex.join(words)}"]
    if not recipe.checkpoint.every_steps:
        return []
    merged = str(output / MODEL)
    export = place.to_type("export", str(output), f"to={merged}")
    return [f"serve:      {export}", f"            then: vllm serve {shlex.quote(merged)}"]


def _evaluated(records: list[dict[str, Any]]) -> list[str]:
    """Return a line on the first, last and best evaluation, or none where no loss was finite."""
    losses = [record["eval_loss"] for record in records if record["eval_loss"] is not None]
    if not losses:
        return []
    known = f"{losses[0]:.3f} → {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
    best = Best.of(records)
    if best.since:
        known += f", best {best.loss:.3f} after step {best.step}"
    return [f"evaluation: loss {known}"]


def _on_gpus(recipe: Recipe, gpus: int) -> list[str]:
    words = ["launch.device=cuda", f"launch.processes={gpus}", "model.dtype=bfloat16"]
    words.append("parallel_config.data_parallel=auto")
    if gpus % recipe.parallel_config.context_parallel:
        words.append("parallel_config.context_parallel=1")
    return [*words, "checkpoint.resume=never"]


def _another_layout(recipe: Recipe) -> list[str]:
    """Return overrides for the same run, split another way: its numbers should not change.

    Where rows are not split, they ask for twice as many steps instead.
    """
    parallel = recipe.parallel_config
    if parallel.context_parallel == 1:
        if recipe.training.stop_step:
            return [f"training.stop_step={2 * recipe.training.stop_step}"]
        return [f"training.steps={2 * (recipe.training.steps or 100)}"]
    others = [row for row in CONTEXT.values() if not row.ulysses_required]
    others.sort(key=lambda row: (row.splits is Splits.HEADS, row.automatic))
    other = next(row for row in others if row.name != parallel.context_parallel_algo)
    return [
        f"parallel_config.context_parallel_algo={other.name}",
        "parallel_config.ulysses_degree_in_cp=null",
        "checkpoint.resume=never",
    ]
