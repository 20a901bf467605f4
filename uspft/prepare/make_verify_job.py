"""What `verify` compares: the model, cut to as many layers as one process has memory for, in every
layout that the recipe can run in. The number of layers is estimated before anything is built."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from uspft.config import Fault, Finding, Recipe
from uspft.config.algorithms import AUTO, OBJECTIVES
from uspft.config.layout_rules import beside_stages
from uspft.layout import Layout
from uspft.model.build import empty_model
from uspft.model.hf_config import attention_of
from uspft.model.tile_sizes import tile_tokens
from uspft.planner.memory.formula import USABLE_SHARE, memory_of
from uspft.planner.options import Options, options_of
from uspft.planner.ways import MAX_LAYOUTS, Candidate, candidates, chosen
from uspft.prepare.examine import Examined
from uspft.prepare.files import output_of
from uspft.prepare.host import Invocation, require_here
from uspft.prepare.known import Known
from uspft.prepare.layout_findings import run_findings
from uspft.prepare.make_job import job_of, with_data, with_model
from uspft.prepare.model import examine_model
from uspft.prepare.resolve import with_stages
from uspft.verify.work import FOLDER, GRADIENT_FILES, REPORT, VerifyJob, without_extras

if TYPE_CHECKING:
    from uspft.families import ModelShape

MAX_PLAIN_TOKENS = 4096
"""The longest row in tokens for which plain transformers runs, which stores all logits in
float32."""
GIB = 1 << 30
_LAYER = re.compile(r"\.layers\.(\d+)\.(.+)")
_ASK_GPU = """import torch
here = min(torch.cuda.device_count(), {count})
print(min(torch.cuda.mem_get_info(i)[0] for i in range(here)) // -(-{count} // here))"""


@dataclass(frozen=True)
class Sizes:
    """What decides the memory of one process that has whole rows."""

    shape: ModelShape
    kinds: tuple[Hashable, ...]
    """The kind of each layer, for telling different layers apart."""
    row_tokens: int
    options: Options
    beside_bytes: int = 0
    """Bytes that plain transformers needs in addition to the formula's, at its peak."""

    def memory_bytes(self, depth: int) -> int:
        """Return the bytes that one process needs for the first `depth` layers."""
        types = self.shape.raw.get("layer_types")
        raw = {**self.shape.raw, "layer_types": types[:depth]} if types else self.shape.raw
        shape = replace(self.shape, layers=depth, raw=raw)
        predicted = memory_of(shape, Layout(), self.row_tokens, options=self.options)
        return predicted.peak_bytes + predicted.host_bytes + self.beside_bytes

    @property
    def shallowest(self) -> int:
        """The smallest number of first layers that has every kind of layer."""
        return max(self.kinds.index(kind) for kind in self.kinds) + 1


def sizes_of(recipe: Recipe, config: Any, shape: ModelShape, *, with_plain: bool) -> Sizes:
    """Return the sizes of a recipe's model on one process, without ZeRO sharding.

    with_plain: whether plain transformers runs there too, in float32, with all logits at once.
    """
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    kinds: list[list[Hashable]] = [[kind] for kind in types]
    for kind, turned in zip(kinds, getattr(config, "no_rope_layers", None) or (), strict=False):
        kind.append(turned)
    for name, parameter in empty_model(config, config.dtype).named_parameters():
        if place := _LAYER.search(name):
            kinds[int(place[1])].append((place[2], parameter.shape))
    alone, beside = replace(options_of(recipe, Layout()), zero_stage=0), 0
    tokens = recipe.data.sequence_length
    if with_plain:
        alone = replace(alone, dtype="float32", micro_batch=1, loss_tile=None, mlp_tile=None)
        beside = score_bytes(config, tokens)
    elif alone.loss_tile is None and recipe.memory.loss_tile_tokens == AUTO:
        alone = replace(alone, loss_tile=tile_tokens(AUTO, config.vocab_size))
    return Sizes(shape, tuple(map(tuple, kinds)), tokens, alone, beside)


def score_bytes(config: Any, length_tokens: int) -> int:
    """Return about how many bytes of float32 scores one layer's attention saves for the backward.

    Scores are saved raw, capped, masked, as weights, and as their gradient; 0 where transformers
    does not materialise them.
    """
    written_out = attention_of(config) == "eager"
    return 5 * 4 * config.num_attention_heads * length_tokens**2 if written_out else 0


def why_not_plain(recipe: Recipe, config: Any, memory: int) -> str | None:
    """Return why plain transformers is not compared too, or None where it is.

    memory: the bytes that one process has.
    """
    length = recipe.data.sequence_length
    if not OBJECTIVES[recipe.training.objective].plain:
        return f"it does not compute what training.objective: {recipe.training.objective} asks for"
    if length > MAX_PLAIN_TOKENS:
        return f"rows have {length:,} tokens, and it takes {MAX_PLAIN_TOKENS:,} at most"
    if recipe.model.adapter and recipe.model.adapter.dropout:
        return "peft draws an adapter's dropout in another way"
    # Whole logits, their exponentials and gradients: at most a quarter of the memory.
    if 4 * 3 * 4 * length * config.vocab_size > memory:
        return f"the logits of {length:,} tokens take too much memory"
    if 4 * score_bytes(config, length) > memory:
        return f"transformers writes out every score of {length:,} tokens, and they take too much"
    return None


def fitting_depth(sizes: Sizes, memory: int) -> int:
    """Return the most layers for which one process has memory.

    Raises Fault where even the smallest number with every kind of layer does not fit.
    """
    usable = USABLE_SHARE * memory
    for depth in range(len(sizes.kinds), sizes.shallowest - 1, -1):
        if sizes.memory_bytes(depth) <= usable:
            return depth
    needed = sizes.memory_bytes(sizes.shallowest) / GIB
    what = (
        f"one process would need about {needed:.3g} GiB with {sizes.shallowest} of "
        f"{len(sizes.kinds)} layers, and has {usable / GIB:.3g} GiB"
    )
    remedy = "verify shorter rows, fewer launch.processes, or on a machine with more memory"
    raise Fault([("data.sequence_length", what, remedy)])


def with_depth(recipe: Recipe, depth: int) -> Recipe:
    """Return the recipe with only the first `depth` layers of its model, rebalanced over the
    stages."""
    overrides = {**recipe.model.overrides, "num_hidden_layers": depth}
    for key in ("layer_types", "no_rope_layers"):
        if overrides.get(key):
            overrides[key] = list(overrides[key])[:depth]
    dealt = {"layers_per_stage": None, "offset": None}
    return recipe.changed(model={"overrides": overrides}, parallel_config=dealt)


def memory_here(recipe: Recipe) -> int:
    """Return the bytes for one process: the fullest GPU's free memory, or the host's ÷ processes.

    A child process asks the GPUs, so that its CUDA memory is freed when it ends. Raises
    RuntimeError where they cannot be asked.
    """
    processes = recipe.launch.processes
    assert isinstance(processes, int)
    if recipe.launch.device == "cuda":
        command = [sys.executable, "-c", _ASK_GPU.format(count=processes)]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise RuntimeError(f"the GPUs' free memory cannot be read: {asked.stderr.strip()}")
        return int(asked.stdout)
    return int(psutil.virtual_memory().available) // processes


STEPS = 3
"""The default number of steps to compare."""


def prepare_verify(
    found: Examined,
    place: Invocation,
    screen: Console,
    steps: int,
    inject: str | None,
    every: bool,
) -> tuple[VerifyJob, list[Candidate], dict[str, Any]]:
    """Prepare model and data, and return what the ranks run, every layout, and facts for the
    report.

    steps, inject, every: as in the command. Layouts that are not run have a reason. Raises Fault
    where this host, the model or the data cannot be verified.
    """
    require_here(found.recipe, found.loaded.recipe.launch.device, place.environment)
    found = found.asking(without_extras)
    found = with_model(found, place)
    limit_seconds = found.recipe.launch.timeout_minutes * 60
    memory = place.meeting.least("bytes of a process", memory_here(found.recipe), limit_seconds)
    config = examine_model(found.here).config
    why_not = why_not_plain(found.here, config, memory)
    whole = config.num_hidden_layers
    assert found.shape  # the model's config is on this host
    sizes = sizes_of(found.here, config, found.shape, with_plain=why_not is None)
    kept = fitting_depth(sizes, memory)
    if kept < whole:
        what = f"its first {kept} of {whole} layers, which is what one process holds here"
        screen.print(f"model: {what}", markup=False)
        places = found.known.places
        found = found.asking(lambda recipe: with_depth(recipe, kept)).knowing_model(places)
        # of the whole model: the parameters that `freeze` names may be in the removed layers
        config = examine_model(found.here).config
    if why_not:
        screen.print(f"plain transformers is not run: {why_not}", markup=False)
    found = with_data(found, place, screen)
    if found.why_strategies:
        screen.print(f"strategies: {found.why_strategies}", markup=False)
    job = job_of(found, place, {})

    def problems(recipe: Recipe, layout: Layout) -> list[Finding]:
        wrong = beside_stages(recipe) if layout.pipeline > 1 else ()
        return [*wrong, *run_findings(recipe, layout, found.shape)]

    possible = candidates(found.recipe, found.layout.ranks, problems)
    layouts = [
        with_layers(found.recipe, one, found.known)
        for one in chosen(possible, None if every else MAX_LAYOUTS)
    ]
    work = VerifyJob(
        job,
        tuple(one.parallel for one in layouts if one.reason is None),
        min(steps, job.steps),
        output_of(found.recipe) / FOLDER,
        with_plain=why_not is None,
        inject=inject,
    )
    recipe = job.recipe
    facts = {
        "command": job.command,
        "ranks": found.layout.ranks,
        "device": recipe.launch.device,
        "dtype": recipe.model.dtype,
        "zero_stage": recipe.deepspeed.zero_optimization.get("stage", 1),
        "sequence_length": recipe.data.sequence_length,
        "global_batch_size": recipe.training.global_batch_size,
        "steps": work.steps,
        "layers": {"kept": kept, "of": whole},
    }
    return work, layouts, facts


def with_layers(recipe: Recipe, one: Candidate, known: Known) -> Candidate:
    """Return a layout with the layers of each of its pipeline stages set, as ranks read it."""
    recipe = recipe.changed(parallel_config=one.parallel)
    return replace(one, parallel=with_stages(recipe, one.layout, known).parallel_config)


def clear_results(work: VerifyJob) -> None:
    """Create the folder of results, and delete those of an earlier command.

    Nothing else is deleted, since another host may already log there. Raises Fault where the folder
    cannot be written.
    """
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
        for pattern in (REPORT, "*.jsonl", GRADIENT_FILES):
            for file in work.folder.glob(pattern):
                file.unlink()
    except OSError as error:
        what = f"`{work.folder}` cannot be written: {error.strerror}"
        raise Fault([("output_dir", what, "name another folder")]) from error
