"""The keys that a recipe leaves to the planner (`auto`, or omitted), and the values they get.

The planner chooses all of them together, three times, each time knowing more: first the recipe and
the machine, then also the model's sizes, then also the documents of the run's first rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from uspft.config import ParallelBlock, Recipe
from uspft.config.algorithms import AUTO, CONTEXT, ON_A_MESH, TENSOR, Splits
from uspft.config.deepspeed_fields import stages_for
from uspft.config.layout_rules import beside_stages, experts
from uspft.config.messages import as_written
from uspft.config.recipe import PLANNED
from uspft.config.strategies import strategies_of, under
from uspft.config.types import Open
from uspft.families import ModelShape
from uspft.pipeline.stages import schedule_of
from uspft.planner.mesh import tuned
from uspft.planner.options import slices_of, stage_of
from uspft.planner.rank import (
    RECOMPUTE,
    ROWS,
    STAGE,
    Choice,
    as_long,
    likely,
    recommend,
    values_of,
)
from uspft.planner.ways import Space, Way, WhyNot, in_recipe
from uspft.prepare.known import Known, recomputes_of, settled_memory, step_shape
from uspft.prepare.layout_findings import layout_findings

BLOCK = "parallel_config"
SLICES = f"{BLOCK}.tensor_slices"
MOST_ROWS = 32
"""The most rows per forward that `micro_batch_size: auto` tries, in powers of two that divide a
step's rows; with so many, kernel launches hardly matter."""
BY_RECIPE = "by the recipe and the machine"
BY_MODEL = "by the model's sizes"
BY_ROWS = "by the documents of the run's first rows"


class Decision(NamedTuple):
    """What the planner has chosen for the open keys of a recipe, and why."""

    choice: Choice
    by: str
    """A phrase for the facts that it was decided by."""
    values: Mapping[str, Any]
    """The value of each key."""

    @property
    def why(self) -> str:
        """The reason for all values, in one sentence."""
        return f"{self.by}, {self.choice.why}"

    @property
    def lines(self) -> list[str]:
        """The reason for all values, and a reason for each key, as lines."""
        each = [f"{key}: {self._reason(key, value)}" for key, value in self.values.items()]
        return [self.why, *each] if each else []

    @property
    def comments(self) -> dict[str, str]:
        """The comment for each key in the recipe that a run writes."""
        found = {key: f"auto: {self._reason(key, value)}" for key, value in self.values.items()}
        block = BLOCK if any(key.startswith(BLOCK) for key in found) else next(iter(found), None)
        if block:
            whole = f"auto, {self.why}"
            found[block] = f"{whole}; {found[block]}" if block in found else whole
        return found

    def _reason(self, key: str, value: Any) -> str:
        why = self.choice.reasons.get(key)
        return as_written(value) + (f", since {why}" if why else "")


def ranks_of(recipe: Recipe, known: Known) -> int | None:
    """Return the number of processes on all hosts, or None where it is unknown.

    It is the command's, or else the recipe's, or else the number of this machine's GPUs.
    """
    if known.ranks:
        return known.ranks
    if recipe.launch.processes != AUTO:
        return int(recipe.launch.processes) * known.hosts
    here = known.gpus if recipe.launch.device == "cuda" else 0
    return here * known.hosts or None


def degrees_are_open(recipe: Recipe) -> str | None:
    """Return a degree that is `auto`, so that the degrees do not determine the number of processes;
    None without one."""
    for key in ("model_parallel", "context_parallel", "pipeline_stage"):
        if isinstance(getattr(recipe.parallel_config, key), Open):
            return f"{BLOCK}.{key}"
    return None


def open_keys(recipe: Recipe) -> tuple[str, ...]:
    """Return the open keys of a recipe with one layout, in the planner's order.

    If a degree is `auto`, omitted keys on how the degree is used are open too.
    """
    parallel, again = recipe.parallel_config, recomputes_of(recipe, recipe.launch.device)
    tensor = isinstance(parallel.model_parallel, Open)
    context = isinstance(parallel.context_parallel, Open)
    stages = isinstance(parallel.pipeline_stage, Open)
    mesh = _on_a_mesh(parallel)
    algorithm, shared = parallel.context_parallel_algo, context or parallel.row_ranks > 1 or mesh
    tokens = not _says_of_tokens(parallel) or parallel.use_seq_parallel
    free = shared and (algorithm == AUTO or (algorithm is None and context))
    named, ulysses = CONTEXT.get(algorithm or ""), parallel.ulysses_degree_in_cp
    both = free or bool(named and named.splits is Splits.BOTH and context)
    zero_stage = recipe.deepspeed.zero_optimization.get("stage", 1)
    every = {
        f"{BLOCK}.data_parallel": parallel.data_parallel == AUTO and (tensor or context or stages),
        f"{BLOCK}.model_parallel": tensor,
        f"{BLOCK}.use_seq_parallel": tensor and tokens and not mesh,
        f"{BLOCK}.pipeline_stage": stages,
        f"{BLOCK}.pp_interleave_num": stages,
        f"{BLOCK}.context_parallel": context,
        f"{BLOCK}.context_parallel_algo": free,
        f"{BLOCK}.ulysses_degree_in_cp": isinstance(ulysses, Open) or (ulysses is None and both),
        f"{BLOCK}.expert_parallel": isinstance(parallel.expert_parallel, Open),
        f"{BLOCK}.tensor_mesh": mesh and not isinstance(parallel.tensor_mesh, tuple),
        SLICES: mesh and slices_of(parallel) is None,
        STAGE: isinstance(zero_stage, Open),
        ROWS: isinstance(recipe.training.micro_batch_size, Open),
        RECOMPUTE: recipe.memory.recompute == AUTO and len(again) > 1,
    }
    return tuple(key for key, is_open in every.items() if is_open)


def _says_of_tokens(parallel: ParallelBlock) -> bool:
    """Return whether `use_seq_parallel` is fixed, by the recipe itself or because the tensor degree
    is."""
    given = "use_seq_parallel" in parallel.model_fields_set
    return given or not isinstance(parallel.model_parallel, Open)


def _virtual(parallel: ParallelBlock) -> set[int]:
    """Return the numbers of virtual stages per rank that the recipe allows if it has several
    stages."""
    asked, interleaved = parallel.pp_interleave_num, parallel.pipeline_interleave
    said = "pp_interleave_num" in parallel.model_fields_set
    if said or not isinstance(parallel.pipeline_stage, Open):
        return {asked}
    every = set(Space().virtual)
    return every if interleaved in (AUTO, None) else {v for v in every if (v > 1) == interleaved}


def _on_a_mesh(parallel: ParallelBlock) -> bool:
    """Return whether matrices, if they are split, are split in blocks over a mesh."""
    blocks = TENSOR[parallel.tensor_parallel_algo].splits is Splits.BLOCKS
    split = parallel.model_parallel > 1 or isinstance(parallel.model_parallel, Open)
    return blocks and split


def space_of(recipe: Recipe) -> Space:
    """Return the layouts, and the settings of their steps, among which a recipe with one layout
    lets the planner choose."""
    parallel, open_ = recipe.parallel_config, open_keys(recipe)

    def fixed(key: str) -> set[Any] | None:
        return None if f"{BLOCK}.{key}" in open_ else {getattr(parallel, key)}

    mesh, algorithms = _on_a_mesh(parallel), fixed("context_parallel_algo")
    if algorithms == {None} and mesh:
        algorithms = {ON_A_MESH}
    ulysses = fixed("ulysses_degree_in_cp")
    if ulysses == {None}:
        rows = [CONTEXT[name] for name in algorithms or () if name in CONTEXT]
        ulysses = {1} if any(row.splits is Splits.BOTH for row in rows) else None
    zero, batch = recipe.deepspeed.zero_optimization, recipe.training.global_batch_size
    several = ROWS in open_ and recipe.launch.device != "cpu"
    powers = [1 << n for n in range(MOST_ROWS.bit_length()) if batch % (1 << n) == 0]
    return Space(
        tensor=fixed("model_parallel"),
        context=fixed("context_parallel"),
        data=None if parallel.data_parallel == AUTO else {int(parallel.data_parallel)},
        ulysses=ulysses,
        algorithms=algorithms and {name for one in algorithms for name in _alike(one, ulysses)},
        tokens={parallel.use_seq_parallel} if _says_of_tokens(parallel) else (False, True),
        flat=not mesh,
        meshes=mesh,
        stages=stages_for(zero) if STAGE in open_ else {stage_of(recipe)},
        rows=powers if several else {int(recipe.training.micro_batch_size)},
        recomputes=recomputes_of(recipe, recipe.launch.device),
        pipelines=fixed("pipeline_stage"),
        schedulers={schedule_of(parallel).scheduler},
        virtual=_virtual(parallel),
        chunks=parallel.seq_split_num,
        experts=fixed("expert_parallel"),
    )


def _alike(named: str | None, ulysses: Collection[int] | None) -> set[str | None]:
    """Return the names of algorithms that equal the named one at some degrees, itself included: a
    hybrid with one Ulysses rank is a ring, and with one ring rank it is Ulysses."""
    row = CONTEXT.get(named or "")
    if row is None or row.splits is not Splits.BOTH:
        return {named}
    if row.ulysses_required and (ulysses is None or 1 in ulysses):
        return {one.name for one in CONTEXT.values() if one.label == row.label}
    return {named, *(one.name for one in CONTEXT.values() if one.splits is Splits.HEADS)}


def other_than_asked(recipe: Recipe) -> WhyNot:
    """Return a check of whether a candidate contradicts a key of the recipe that `space_of` does
    not cover."""
    parallel, batch = recipe.parallel_config, recipe.training.global_batch_size
    mesh, ulysses = parallel.tensor_mesh, parallel.ulysses_degree_in_cp
    shares = isinstance(parallel.context_parallel, Open) or _on_a_mesh(parallel)
    chosen = shares or parallel.context_parallel_algo == AUTO or isinstance(ulysses, Open)

    def why_not(way: Way) -> str | None:
        layout = way.layout
        written = ulysses is not None and not isinstance(ulysses, Open)
        shape = layout.mesh_rows, layout.mesh_columns
        staged = layout.pipeline > 1 and isinstance(parallel.pipeline_stage, Open)
        passes = -(-batch // (way.rows * layout.data))
        others = (
            written and shares and ulysses != layout.ulysses,
            isinstance(mesh, tuple) and layout.is_mesh and mesh != shape,
            staged and parallel.micro_batch_num not in (AUTO, passes),
            recipe.memory.recompute == "exchange" and chosen and layout.ulysses == 1,
        )
        return "another is asked for" if any(others) else None

    return why_not


def wrong_in(recipe: Recipe, shape: ModelShape, asked: Collection[str]) -> WhyNot:
    """Return a check of why a recipe cannot run as a candidate, or None where it can.

    asked: the open keys. MeshSlice is checked with one slice, which is legal on every mesh where
    others are.
    """
    known = dict[tuple[object, ...], str | None]()
    if _on_a_mesh(recipe.parallel_config):
        written = None if SLICES in asked else slices_of(recipe.parallel_config)
        recipe = with_values(recipe, {SLICES: written or (1,) * 4})

    def why_not(way: Way) -> str | None:
        # The recomputation setting does not matter here.
        key = way.layout, way.row.name, way.splits_tokens, way.stage, way.rows, way.schedule
        if key not in known:
            known[key] = wrong(way)
        return known[key]

    def wrong(way: Way) -> str | None:
        tried = in_recipe(recipe, way)
        if way.layout.pipeline > 1 and (beside := next(beside_stages(tried), None)):
            return " ".join(beside[:2])
        found = [*experts(tried), *layout_findings(tried, way.layout, shape)]
        return found[0][1] if found else None

    return why_not


def decided(recipe: Recipe, known: Known) -> Decision | None:
    """Return the values of a recipe's open keys, or None if there are none or the number of
    processes is unknown.

    With strategies the open keys are the ZeRO stage, the rows per forward and what is recomputed.
    They are chosen for the layout of the longest rows or, with `strategies: auto`, for the best
    single layout.
    """
    alone = _longest(recipe)
    asked = open_keys(alone)
    if alone is not recipe:
        asked = tuple(key for key in asked if not key.startswith(BLOCK))
    model = known.shape
    if model is None:  # the memory, and how matrices can be split, are unknown
        later = (RECOMPUTE, f"{BLOCK}.tensor_mesh", SLICES)
        asked = tuple(key for key in asked if key not in later)
    ranks = _ranks(alone, known)
    if not asked or ranks is None or ranks % alone.parallel_config.pipeline_stage:
        return None
    space = space_of(alone)
    # layouts that switch share one optimizer, and moving weights implies ZeRO-1
    if alone is not recipe:
        moves = recipe.parallel_config.switching == "move"
        above = [stage for stage in space.stages if stage > 0]
        space = replace(space, stages=[1] if moves and STAGE in asked else above)
    if model is None or known.cluster is None:
        unknown = "the model's sizes" if model is None else "the cluster"
        why = f"{unknown}, not known yet, may change this"
        return _likely(alone, ranks, space, asked, why)
    if model.experts == 1:
        space = replace(space, experts={1})
    hardware = known.hardware_on(ranks)
    step = step_shape(alone, model)
    seen = known.rows if alone is recipe else ()
    tiled = settled_memory(alone, model)
    wrong, other = wrong_in(tiled, model, asked), other_than_asked(alone)

    def why_not(way: Way) -> str | None:
        return other(way) or wrong(way)

    rows = seen or [step.row]
    found = recommend(step, ranks, space, hardware, rows, why_not=why_not, asked=asked)
    if found is None:
        return _likely(alone, ranks, space, asked, "no way that is left open is legal")
    by = BY_ROWS if seen else BY_MODEL
    if not known.rows and recipe.data.packing != "none":
        by += ", for rows of one document (the documents' lengths, not known yet, may change this)"
    values = _values(alone, found.way, asked)
    if SLICES in asked and found.way.layout.is_mesh:
        mesh = tuned(found.way.placed(found.way.step(step), hardware))
        why = f"in one slice matrices take {as_long(mesh.whole_seconds, mesh.seconds)}"
        found = found._replace(reasons={**found.reasons, SLICES: why})
        values[SLICES] = mesh.slices
    return Decision(found, by, values)


def _longest(recipe: Recipe) -> Recipe:
    """Return the recipe of the longest rows among its strategies, with every degree open if they
    are `auto`; the recipe itself if it has one layout."""
    if recipe.parallel_config.strategies == AUTO:
        alike = {"expert_parallel": recipe.parallel_config.expert_parallel}
        several = {**dict.fromkeys(PLANNED, AUTO), "pipeline_stage": 1}  # pipelines cannot switch
        block = ParallelBlock.model_validate({**several, **alike})
        return recipe.changed(parallel_config=block)
    every = strategies_of(recipe)
    return under(recipe, len(every) - 1) if every else recipe


def _ranks(recipe: Recipe, known: Known) -> int | None:
    """Return the number of processes of a recipe with one layout. If it is unknown, or not a
    multiple of the degrees (reported elsewhere), it is the product of the degrees."""
    parallel, ranks = recipe.parallel_config, ranks_of(recipe, known)
    if degrees_are_open(recipe):
        return ranks
    fixed = parallel.model_parallel * parallel.context_parallel * parallel.pipeline_stage
    if ranks is None or ranks % fixed:
        data = parallel.data_parallel
        return fixed if data == AUTO else fixed * int(data)
    return ranks


def _likely(
    recipe: Recipe, ranks: int, space: Space, asked: Collection[str], why: str
) -> Decision | None:
    """Return values to assume while too little is known for a prediction."""
    rows = recipe.training.global_batch_size
    way = likely(ranks, space, rows, other_than_asked(recipe))
    if way is None:
        return None
    said = f"matrices and rows are split no more than they must; {why}"
    return Decision(Choice(way, said), BY_RECIPE, _values(recipe, way, asked))


def _values(recipe: Recipe, way: Way, asked: Collection[str]) -> dict[str, Any]:
    """Return the value of each of these keys in a candidate."""
    found, algorithm = values_of(way), f"{BLOCK}.context_parallel_algo"
    name = found[algorithm] if algorithm in asked else recipe.parallel_config.context_parallel_algo
    row = CONTEXT.get(name or "")
    if row is None or row.splits is not Splits.BOTH or way.layout.context == 1:
        found[f"{BLOCK}.ulysses_degree_in_cp"] = None
    return {key: found[key] for key in asked if key in found}


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe in which these keys have these values."""
    for path, value in values.items():
        block, *inner, key = path.split(".")
        if inner:
            (field,) = inner
            key, value = field, {**getattr(getattr(recipe, block), field), key: value}
        recipe = recipe.changed(**{block: {key: value}})
    return recipe
