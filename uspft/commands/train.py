"""The command `train`: it checks the recipe, prepares the data, starts the ranks, and ends with
lines on what came out and what to try next."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from uspft.checkpoint.folder import (
    CHECKPOINTS,
    Checkpoint,
    CheckpointError,
    folder_of,
    newest,
    step_folders,
)
from uspft.checkpoint.weights import whole_model
from uspft.commands.export import best_up_to, export_beside
from uspft.commands.rank import start_ranks
from uspft.commands.report import leave_report
from uspft.config import Fault, Recipe
from uspft.config.algorithms import AUTO, CONTEXT, Splits
from uspft.data.corpus.tokenise import holds_tokenizer
from uspft.families.multimodal import loading_class
from uspft.launcher.hosts import Hosts
from uspft.launcher.processes import WRONG_INPUT
from uspft.launcher.remote import BY_HOSTFILE
from uspft.launcher.supervise import Loss, Restart
from uspft.launcher.terminal import say
from uspft.metrics import Best, Journal
from uspft.prepare.examine import examine
from uspft.prepare.files import held_output, not_written, open_output, output_of, space_finding
from uspft.prepare.host import Invocation
from uspft.prepare.make_job import prepare_job
from uspft.prepare.remarks import changes_on_resuming, intervals_told, length_of_run
from uspft.written import (
    ADAPTER,
    EXPORTS,
    INCIDENTS,
    LOGS,
    METRICS,
    MODEL,
    is_of_a_run,
    lacks_export,
)


def train(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Run a recipe and return the exit code. Raises InputError before any rank starts."""
    hosts = place.meeting.hosts
    place.meeting.says("examining the recipe")
    # Host 0 leases the output folder for all hosts: others might see it in an intermediate state.
    first = hosts.index == 0
    environment = place.environment if first else None  # trackers run on host 0 only
    again = [f"checkpoint.resume={loss.resume}" for loss in place.losses[-1:]]
    found = examine(
        target,
        [*overrides, *again],
        hosts.count,
        place.ranks,
        trains=first,
        environment=environment,
    )
    with found.placed():
        restart = _restart(found.recipe, place)
    screen = Console(highlight=False, soft_wrap=True, quiet=hosts.index > 0)
    place.meeting.says("making model and data ready")
    output = output_of(found.recipe)
    holding = held_output(output, screen) if first else nullcontext()
    with found.placed(), holding as lease:  # on host 0, for all hosts
        found, job, checkpoint, damaged, needed = prepare_job(found, place, screen, lease)
        recipe = found.recipe
        if checkpoint and (why := reason_to_end(recipe, job.steps, checkpoint)):
            if lease:
                if not is_of_a_run(output):  # it resumes from another folder
                    open_output(recipe, checkpoint, hosts, place, job.comments)
                _note(recipe, place, damaged)
                export_missing(recipe, checkpoint)
            screen.print(all_done(recipe, why, checkpoint), markup=False)
            return 0
        if lease:
            if wrong := space_finding(recipe, needed):
                raise Fault([wrong])
            moved = open_output(recipe, checkpoint, hosts, place, job.comments)
            if moved:
                screen.print(f"what an earlier run left is now in {moved}", markup=False)
            _note(recipe, place, damaged)
        lines = [*found.settled, *(f"warning: {line}" for line in found.wasted)]
        lines += length_of_run(recipe, job.corpus, job.steps)
        lines += intervals_told(recipe, job)
        if checkpoint:
            lines.append(f"going on from {checkpoint.folder}")
            lines += changes_on_resuming(recipe, checkpoint, job.corpus, job.steps)
        for line in lines:
            screen.print(line, markup=False)
        with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
            job.write(Path(folder))
            logs = output / LOGS
            code = start_ranks([folder], job.recipe, hosts, place, logs=logs, restart=restart)
        if restart and restart.hosts:
            place.meeting.again = _loss(recipe, restart.why, restart.hosts)
            return code
        if lease and code == 0:
            export_missing(recipe, None)
            told = leave_report(found, place) if recipe.logging.report else ""
    if lease and code == 0:
        chats = bool(job.serving.ends)
        said = summary(recipe, target, overrides, place, chats=chats, hosts=hosts.count)
        screen.print("\n".join(filter(None, [said, told])), markup=False)
    elif lease and code != WRONG_INPUT:
        say(how_to_go_on(recipe))
    return code


def _restart(recipe: Recipe, place: Invocation) -> Restart | None:
    """Return the function that decides how a lost run restarts; None where the recipe has none.
    Raises Fault."""
    launch, metrics = recipe.launch, output_of(recipe) / METRICS
    if launch.min_hosts and BY_HOSTFILE in place.environment:
        what = "with --hostfile all hosts end where one is gone"
        remedy = "write null, or start each host by srun or by hand"
        raise Fault([("launch.min_hosts", what, remedy)])

    def may(why: str) -> bool:
        step, number = Journal(metrics).last_step(), len(place.losses) + 1
        if number > launch.restarts:
            return False
        if any(loss.step == step for loss in place.losses):
            say(f"lost after step {step} as before: it does not start again")
            return False
        say(f"starting again, {number} of {launch.restarts} (launch.restarts)")
        return True

    return Restart(may, launch.min_hosts) if launch.restarts else None


def _loss(recipe: Recipe, why: str, hosts: Hosts) -> Loss:
    """Return how a run was lost, and where it restarts: from its newest checkpoint, or from the
    beginning."""
    output, wish = output_of(recipe), recipe.checkpoint.resume
    own = bool(step_folders(output / CHECKPOINTS)) or wish == "never"
    return Loss(why, Journal(output / METRICS).last_step(), hosts, AUTO if own else wish)


def _note(recipe: Recipe, place: Invocation, damaged: Sequence[str]) -> None:
    """Record damaged checkpoints, and in the journal also why the run restarted, if it did. Raises
    Fault."""
    output = output_of(recipe)
    try:
        for line in damaged:
            Journal(output / INCIDENTS).write({"damaged": line})
        for loss in place.losses[-1:]:
            record = {"restart": len(place.losses), "after_step": loss.step, "why": loss.why}
            for name in (INCIDENTS, METRICS):
                Journal(output / name).write(record)
    except OSError as error:
        raise not_written(output, error) from error


def how_to_go_on(recipe: Recipe) -> str:
    """Return a line on what an interrupted run has saved, and how to continue it."""
    output = output_of(recipe)
    try:
        checkpoint, _ = newest(output, contents=False)
    except CheckpointError as error:
        return str(error)
    if checkpoint is None:
        return f"nothing is saved in {output}: the same command starts anew"
    how = "" if recipe.checkpoint.resume == "auto" else "with checkpoint.resume=auto "
    return f"saved step {checkpoint.step} in {checkpoint.folder}; {how}the same command goes on"


def reason_to_end(recipe: Recipe, steps: int, checkpoint: Checkpoint | None) -> str | None:
    """Return why no step follows the checkpoint to resume; None where steps remain.

    steps: of the whole run, regardless of `training.stop_step`.
    """
    if checkpoint is None:
        return None
    if checkpoint.step >= steps:
        return f"all {steps:,} steps are done" if steps > 1 else "the only step is done"
    patience, key = recipe.training.patience, "stop_step"
    if checkpoint.step < (recipe.training.stop_step or steps):
        best, key = best_up_to(output_of(recipe), checkpoint), "patience"
        if patience is None or best is None or best.since < patience:
            return None
    how = f"to go on: a larger training.{key}, or null"
    return f"the run ended after step {checkpoint.step}, as training.{key} says ({how})"


def all_done(recipe: Recipe, why: str, checkpoint: Checkpoint) -> str:
    """Return a line on why nothing is left to do, and where the results are."""
    output = output_of(recipe)
    made = [f"{name} {output / name}" for name in EXPORTS if (output / name).exists()]
    where = ", ".join([f"checkpoint {checkpoint.folder}", *made])
    return f"{why}: {where}; to train anew: checkpoint.resume=never"


def export_missing(recipe: Recipe, checkpoint: Checkpoint | None) -> None:
    """Write the exports that the recipe asks for and that are missing or out of date.

    They are missing if the run was stopped between its last save and its export, or if the best
    checkpoint is not the last. checkpoint: of the last step; None after the ranks of this run
    ended, when at most the best one is missing. Raises CheckpointError.
    """
    output, model, adapter = output_of(recipe), recipe.export.huggingface, recipe.model.adapter
    wanted = (model and MODEL) or (adapter and ADAPTER)
    if not wanted or not lacks_export(output, wanted):
        return
    best = best_up_to(output, checkpoint) if recipe.checkpoint.keep_best else None
    if best and best.step is not None:
        checkpoint = Checkpoint.open(folder_of(output, best.step))
    if checkpoint:
        export_beside(whole_model(checkpoint), checkpoint, output, model=model)


QUICKSTART = "quickstart.yaml"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank may have; its default is 16."""


def summary(
    recipe: Recipe,
    target: Path,
    overrides: Sequence[str],
    place: Invocation,
    *,
    chats: bool,
    hosts: int = 1,
) -> str:
    """Return the lines at the end of a successful run.

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
    if recipe.data.eval or recipe.data.eval_fraction:  # otherwise they are of an earlier run
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
    if recipe.checkpoint.saves:
        length = "epochs" if training.epochs else "steps"
        more = "a larger training.patience" if early else f"more training.{length}"
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
    """Return lines on what to do next: after the quickstart, the same run with another algorithm,
    which is its point; after other runs, how to use the model. early: whether patience ended the
    run. chats, hosts: as in `summary`."""

    def command(words: list[str]) -> str:
        if hosts > 1:  # each host knows only its own command line
            return f"started on all {hosts} hosts as this run was, with {shlex.join(words)}"
        keys = {word.partition("=")[0] for word in words}
        kept = [word for word in overrides if word.partition("=")[0] not in keys]
        return place.to_type(str(target), *kept, *words)

    gpus = torch.cuda.device_count()
    if recipe.launch.device == "cpu" and gpus:
        there = ["launch.device=cuda", f"launch.processes={gpus}", "model.dtype=bfloat16"]
        there.append("parallel_config.data_parallel=auto")
        if gpus % recipe.parallel_config.context_parallel:
            there.append("parallel_config.context_parallel=1")
        return [f"on this machine's GPUs: {command([*there, 'checkpoint.resume=never'])}"]
    chosen = [word for word in overrides if word.startswith("parallel_config")]
    switches = recipe.parallel_config.strategies or "strategies" in " ".join(chosen)
    if target.name == QUICKSTART and not chats and not switches:
        return [f"try next:   {command(_another_layout(recipe))}"]
    lines, output, training = [], output_of(recipe), recipe.training
    if chats and any((output / name).is_dir() for name in (MODEL, ADAPTER)):
        lines.append(f"chat:       {place.to_type('chat', str(output))}")
    exported = output / (MODEL if recipe.export.huggingface else ADAPTER)
    if exported.is_dir() and not holds_tokenizer(exported):  # its samples were token ids
        lacks = f"{shlex.quote(str(exported))} holds no tokenizer, which servers need"
        lines.append(f"serve:      {lacks}: copy yours into it (tokenizer.json and its config)")
    elif recipe.export.huggingface:
        folder = shlex.quote(str(exported))
        lines.append(f"serve:      vllm serve {folder}")
        lines.append(f"            for llama.cpp: python convert_hf_to_gguf.py {folder}")
    elif recipe.model.adapter:
        lines += _adapter_served(recipe, place)
    # The suggested command resumes this run, even if it began from elsewhere or anew.
    here = [] if recipe.checkpoint.resume == AUTO else [f"checkpoint.resume={AUTO}"]
    if training.patience and early:
        longer = f"training.patience={2 * training.patience}"
        lines.append(f"go on:      {command([longer, *here])}")
    elif recipe.checkpoint.saves:
        key, count = "epochs", training.epochs
        if training.stop_step:
            key, count = "stop_step", training.stop_step
        elif training.steps:
            key, count = "steps", training.steps
        lines.append(f"go on:      {command([f'training.{key}={2 * (count or 1):.15g}', *here])}")
    return lines


def _adapter_served(recipe: Recipe, place: Invocation) -> list[str]:
    """Return lines on how to serve an adapter without a merged model: on its base, or merged first
    if a server would take config or chat template from the base and those differ."""
    model, output = recipe.model, output_of(recipe)
    assert model.adapter is not None
    own = model.rope_scaling or model.overrides or model.tokenizer or recipe.data.chat_template
    served = next((rank for rank in VLLM_RANKS if rank >= model.adapter.rank), None)
    if model.name_or_path and served and not own:
        words = ["vllm", "serve", model.name_or_path, "--enable-lora"]
        words += ["--max-lora-rank", str(served), "--lora-modules", f"tuned={output / ADAPTER}"]
        return [f"serve:      {shlex.join(words)}"]
    if not recipe.checkpoint.saves:
        return []
    merged = str(output / MODEL)
    export = place.to_type("export", str(output), f"to={merged}")
    return [f"serve:      {export}", f"            then: vllm serve {shlex.quote(merged)}"]


def _evaluated(records: list[dict[str, Any]]) -> list[str]:
    """Return a line on the first, last and best evaluation, or none without a finite loss."""
    losses = [record["eval_loss"] for record in records if record["eval_loss"] is not None]
    known = " → ".join(f"{loss:.3f}" for loss in (losses[:1] + losses[1:][-1:]))
    best = Best.of(records)
    if best.since:
        known += f", best {best.loss:.3f} after step {best.step}"
    return [f"evaluation: loss {known}"] if losses else []


def _another_layout(recipe: Recipe) -> list[str]:
    """Return overrides for the same run split another way, which should not change its numbers.

    Where rows are not split, they ask for twice as many steps instead.
    """
    parallel, training = recipe.parallel_config, recipe.training
    if parallel.context_parallel == 1:
        key = "stop_step" if training.stop_step else "steps"
        return [f"training.{key}={2 * (training.stop_step or training.steps or 100)}"]
    others = [row for row in CONTEXT.values() if not row.ulysses_required]
    others.sort(key=lambda row: (row.splits is Splits.HEADS, row.automatic))
    other = next(row for row in others if row.name != parallel.context_parallel_algo)
    return [
        f"parallel_config.context_parallel_algo={other.name}",
        "parallel_config.ulysses_degree_in_cp=null",
        "checkpoint.resume=never",
    ]
