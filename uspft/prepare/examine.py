"""The examination of a recipe: everything that can be checked before a process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from uspft.config import Fault, Finding, InputError, Loaded, Recipe, RecipeError, read
from uspft.config.algorithms import AUTO
from uspft.config.deepspeed_fields import GPU_ONLY
from uspft.config.messages import as_written
from uspft.config.problems import counted
from uspft.config.strategies import KEY, layouts_of, strategies_of
from uspft.data.files.sources import not_checked, source_problems
from uspft.families import ModelShape, check_length
from uspft.job import placed
from uspft.layout import Layout, layout_of, settled_layout
from uspft.prepare.files import file_findings, find_paths, in_the_way
from uspft.prepare.host import gpu_count, gpu_name, tracker_findings
from uspft.prepare.known import Known, cluster_of
from uspft.prepare.layout_findings import exchange_findings, run_findings
from uspft.prepare.left_open import Decision, degrees_are_open, ranks_of
from uspft.prepare.model import shape_of, tokenizer_of
from uspft.prepare.remarks import memory_sentence, stages_sentence, wasted
from uspft.prepare.resolve import on_device, resolved

SOURCES = ("data.train", "data.eval", "data.eval_fraction", "data.format", "data.fields")
SHAPE = tuple(
    f"model.{key}" for key in ("name_or_path", "config", "overrides", "rope_scaling", "add_tokens")
)
LAYOUT = (
    *("parallel_config", "deepspeed", "memory", "data.sequence_length"),
    *("training.global_batch_size", "training.micro_batch_size"),
    *("launch.processes", "launch.device", "launch.hardware"),
)
PRECISION = ("model.dtype", "model.attention", "launch.device")
"""The keys that `precision` findings depend on; they are skipped if one of these is faulty.
SOURCES, SHAPE and LAYOUT are the same for other findings."""
UNTOLD = f"is {AUTO}, and nothing says on how many processes"
SUMMED = ("deepspeed.zero_optimization.stage", "deepspeed.zero_optimization.offload_optimizer")
"""Keys whose findings depend on the dtype in which gradients are summed, `model.dtype`."""


@dataclass(frozen=True)
class Examined:
    """A recipe without known errors, with every `auto` resolved that can be."""

    loaded: Loaded
    known: Known
    recipe: Recipe
    layout: Layout
    not_checked: list[str] = field(default_factory=list)
    decision: Decision | None = None
    """What the planner chose for the open keys."""

    @property
    def shape(self) -> ModelShape | None:
        return self.known.shape

    @property
    def corpus(self) -> Path:
        """The folder of the tokenised training data."""
        assert self.known.corpus
        return self.known.corpus

    @property
    def is_open(self) -> bool:
        """Whether layouts are not chosen yet because that needs the lengths of the data."""
        return self.recipe.parallel_config.strategies == AUTO

    @property
    def why_strategies(self) -> str | None:
        """What `strategies: auto` became and why; None where it was not used or is open."""
        asked, found = self.loaded.recipe, self.known.weighed
        if asked.parallel_config.strategies != AUTO or found is None:
            return None
        why = f"by the lengths of the {found.source} {found.choice.why}"
        if found.choice.switches:
            return f"several layouts, since {why}"
        samples, rows = asked.training.global_batch_size, found.drawn.packed_rows
        return f"one layout, since {why}; {samples} samples a step make {counted(rows, 'row')}"

    @property
    def hardware(self) -> str:
        """What `launch.hardware` became."""
        assert self.known.cluster  # otherwise the recipe would have been refused
        open_ = self.known.ranks and self.loaded.recipe.launch.device == AUTO
        elsewhere = open_ and self.recipe.launch.device == "cpu"
        more = "; for GPUs that are not here write launch.device=cuda" if elsewhere else ""
        return self.known.cluster.sentence + more

    @property
    def memory(self) -> tuple[str | None, str]:
        """A sentence on a rank's memory and its card's; or None, and why it cannot be predicted."""
        if self.is_open:
            return None, "the layouts are not chosen yet"
        if self.shape is None or self.known.cluster is None:
            return None, "the sizes of the model are not known here"
        hardware, asked = self.known.cluster.hardware, self.loaded.recipe.memory
        return memory_sentence(self.recipe, self.shape, self.layout, hardware, asked), ""

    @property
    def here(self) -> Recipe:
        """The recipe as this host reads it, with local folders in place of hub ids."""
        return placed(self.recipe, self.known.places)

    @property
    def sentence(self) -> str:
        """The layout, ZeRO stage and compute dtype as a phrase."""
        recipe, parallel = self.recipe, self.recipe.parallel_config
        layout = self.layout.sentence(parallel.context_parallel_algo, open_=parallel.mesh_is_open)
        if self.is_open:
            layout = f"{self.layout.ranks} processes, split as the lengths of the data ask"
        stage = recipe.deepspeed.zero_optimization.get("stage", 1)
        return f"{layout}; ZeRO-{stage}, {recipe.model.dtype} on {recipe.launch.device}"

    @property
    def each_layout(self) -> list[tuple[Recipe, Layout]]:
        """The layout of each strategy, or the only one, each with the recipe of its rows."""
        every, ranks = layouts_of(self.recipe), self.layout.ranks
        return [(alone, settled_layout(alone.parallel_config, ranks)) for alone in every]

    @property
    def strategies(self) -> list[str]:
        """A line for each strategy, if the recipe has several: its rows and their layout."""
        lines, shortest = [], 1
        for alone, layout in self.each_layout if strategies_of(self.recipe) else ():
            length = alone.data.sequence_length
            how = layout.sentence(alone.parallel_config.context_parallel_algo)
            if layers := alone.parallel_config.layers_per_stage:
                how += f"; {as_written(layers)} layers"
            lines.append(f"{shortest:,} to {length:,} tokens: {how}")
            shortest = length + 1
        return lines

    @property
    def settled(self) -> list[str]:
        """Lines on how the run is split, by which hardware file, and why."""
        told = [
            ("layout", self.sentence),
            ("stages", stages_sentence(self.recipe, self.layout, self.loaded.recipe, self.known)),
            ("strategies", self.why_strategies),
            *(("strategy", line) for line in self.strategies),
            *(("auto", line) for line in (self.decision.lines if self.decision else ())),
            ("hardware", self.hardware),
        ]
        return [f"{of}: {what}" for of, what in told if what]

    @property
    def wasted(self) -> list[str]:
        """A line `key: what; remedy` for each thing that leaves ranks idle."""
        return [*wasted(self.recipe, self.layout, self.each_layout, self.shape)]

    def asking(self, change: Callable[[Recipe], Recipe]) -> Examined:
        """Return the examination of another recipe, which `change` makes from the user's."""
        loaded = replace(self.loaded, recipe=change(self.loaded.recipe))
        return replace(self, loaded=loaded).knowing()

    def knowing(self, **more: Any) -> Examined:
        """Return the examination with more facts, given as fields of Known."""
        known = replace(self.known, **more)
        recipe, decision = resolved(self.loaded.recipe, known)
        layout = settled_layout(recipe.parallel_config, self.layout.ranks)
        return replace(self, known=known, recipe=recipe, layout=layout, decision=decision)

    def knowing_model(self, places: Mapping[str, str]) -> Examined:
        """Return the examination with the model in these local folders, by key of `model`.

        The model may be new to this host. Raises Fault where it cannot be trained, where rows are
        longer than it supports, or where the layout cannot split it.
        """
        local = placed(self.loaded.recipe, places)
        shape = shape_of(local.model)
        if not isinstance(shape, ModelShape):
            raise Fault(shape or [])
        if findings := check_length(shape, local.model, local.data.sequence_length):
            raise Fault(findings)
        found = self.knowing(shape=shape, places=places)
        if findings := run_findings(found.recipe, found.layout, shape):
            raise Fault(findings)
        return found

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Convert findings raised inside the `with` block to a RecipeError with their places.

        An InputError without findings is raised unchanged.
        """
        try:
            yield
        except InputError as error:
            if not error.findings:
                raise
            problems = (self.loaded.origins.problem(*one) for one in error.findings)
            raise RecipeError(problems, error.beside) from error


def examine(
    path: Path,
    overrides: Sequence[str],
    hosts: int,
    ranks: int | None,
    *,
    trains: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Examined:
    """Load and check a recipe, without a device or network, and without writing a file.

    hosts: how many hosts the run has. ranks: processes on all hosts together; None: derived from
    the recipe and this machine. trains: whether a run follows, which needs the output folder.
    environment: of the processes that would train; None: there are none. Raises RecipeError with
    all problems at once.
    """
    given = read(path, overrides)
    loaded, sound = given, given.sound
    known = Known(hosts, gpu_count(), ranks)
    paths = find_paths(loaded)
    asked = paths.recipe
    loaded = replace(loaded, recipe=asked)
    findings = [one for one in file_findings(asked) if sound(one[0])]
    findings += source_problems(asked.data) if sound(*SOURCES) else []
    findings += tracker_findings(asked, environment) if sound("logging") else []
    findings += in_the_way(asked, path) if trains and sound("output_dir", "checkpoint") else []
    # What cannot be checked of the data and the tokenizer on this machine.
    open_questions = list(not_checked(asked.data))
    tokenizer = tokenizer_of(asked.model)
    if tokenizer and not os.path.isdir(tokenizer):  # Path.is_dir raises without permission
        open_questions.append(f"the tokenizer {tokenizer} (not on this machine)")
    shape = shape_of(asked.model) if sound(*SHAPE) else None
    if isinstance(shape, ModelShape):
        known = replace(known, shape=shape)
    elif shape is None:
        named = asked.model.name_or_path
        open_questions.append(f"the sizes of model {named} (not on this machine)")
    else:
        findings += shape
    if not sound(*LAYOUT):
        raise given.together([paths.told(one) for one in findings])
    device = on_device(asked, known).launch.device
    gpu = gpu_name() if device == "cuda" else None
    cluster, wrong = cluster_of(asked.launch.hardware, device, gpu)
    findings += wrong
    known = replace(known, cluster=cluster)
    recipe, decision = resolved(asked, known)
    findings += _precision(recipe, device) if sound(*PRECISION) else ()
    findings += _without_kernels(recipe) if device == "cpu" else ()
    ranks = ranks_of(recipe, known)
    layout = layout_of(recipe.parallel_config, ranks)
    if recipe.parallel_config.strategies == AUTO and ranks is None:
        findings.append((KEY, UNTOLD, "write launch.processes, or list the strategies"))
    elif isinstance(layout, Layout) and (key := degrees_are_open(recipe)):  # even now
        what, remedy = UNTOLD, "write launch.processes (check and plan also take --ranks N)"
        if ranks is not None:
            what = f"is {AUTO}, and no layout of {ranks} processes has what the other keys say"
        findings.append((key, what, "leave some of them out" if ranks else f"{remedy}, or degrees"))
    if isinstance(layout, Layout):
        more = run_findings(recipe, layout, known.shape)
        if layout.ranks % hosts:
            what = f"{layout.ranks} processes do not spread evenly over {hosts} hosts"
            more.append(("launch.processes", what, "start as many on each host"))
        parallel = recipe.parallel_config
        if AUTO not in (parallel.context_parallel_algo, parallel.strategies):  # to be decided yet
            more += exchange_findings(recipe, layout)
        # Findings on the dtype of gradient sums are only valid if model.dtype is.
        findings += [one for one in more if sound("model.dtype") or one[0] not in SUMMED]
        if known.shape:
            findings += check_length(known.shape, asked.model, asked.data.sequence_length)
    else:
        findings.append(layout)
    if findings or given.problems:
        raise given.together([paths.told(one) for one in findings])
    assert isinstance(layout, Layout)
    return Examined(loaded, known, recipe, layout, open_questions, decision)


def _precision(recipe: Recipe, device: str) -> Iterator[Finding]:
    if device == "cuda" and recipe.model.dtype == "float32":
        what, remedy = "float32 has no flash attention on a GPU", "bfloat16, or launch.device: cpu"
        yield "model.dtype", what, f"write {remedy}"
    if device == "cpu" and recipe.model.attention.startswith("flash"):
        what = f"{recipe.model.attention} runs on GPUs only"
        yield "model.attention", what, "write auto or torch"


def _without_kernels(recipe: Recipe) -> Iterator[Finding]:
    """Refuse, on a CPU, ZeRO fields whose kernels DeepSpeed has on GPUs alone."""
    for key in GPU_ONLY:
        value: Any = recipe.deepspeed.zero_optimization
        for part in key.split("."):
            value = (value or {}).get(part)
        if value:
            what = "is true, and DeepSpeed has its kernels on GPUs alone"
            yield f"deepspeed.zero_optimization.{key}", what, "leave it out"
