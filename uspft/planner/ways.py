"""The legal ways to run a step on some ranks: the only place that enumerates layouts, for `plan`,
every `auto`, `strategies: auto` and `verify`.

A way is a layout with its context-parallel algorithm, and the other choices on which a step's time
and memory depend: the ZeRO stage, the micro-batch size, what is recomputed, the schedule of a
pipeline. Illegal ways are counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from uspft.config import Finding, ParallelBlock, Recipe
from uspft.config.algorithms import (
    AUTO,
    CONTEXT,
    MESH_OPTIONS,
    TENSOR,
    WHOLE,
    AlgorithmRow,
    Splits,
    row_of,
)
from uspft.config.layout_rules import WITHOUT_STAGES
from uspft.config.strategies import alike, each_alone
from uspft.families import FAMILIES, ModelShape, attention_windows, state_sizes
from uspft.layout import Layout, settled_layout
from uspft.pipeline.schedules import PLAIN, Schedule, Scheduler
from uspft.pipeline.stages import schedule_of
from uspft.planner.attention_step import local_heads
from uspft.planner.machine import Hardware
from uspft.planner.options import stage_of
from uspft.planner.stages import as_many
from uspft.planner.step_shape import Memo, PlacedStep, StepShape
from uspft.sequence import FORWARDS, Algorithm, make_algorithm, ring_ranks_of_a_host
from uspft.tensor.parts import divide_heads


@dataclass(frozen=True)
class Way:
    """A layout with its context-parallel algorithm, and how a step runs in it."""

    layout: Layout
    row: AlgorithmRow
    """The algorithm's row in the table of config/algorithms.py."""
    splits_tokens: bool = False
    """Whether tensor ranks split the tokens between blocks (use_seq_parallel)."""
    stage: int = 1
    """The ZeRO stage."""
    rows: int = 1
    """Rows of one replica in one forward (`training.micro_batch_size`)."""
    recompute: str = "nothing"
    schedule: Schedule = PLAIN
    """The schedule of the pipeline; without one it has no meaning."""

    @cached_property
    def name(self) -> str:
        """The layout's name, with use_seq_parallel and the schedule."""
        given = f"tensor{self.layout.tensor}"
        tokens = "-tokens" if self.splits_tokens else ""
        name = self.layout.name(self.row.name).replace(given, given + tokens)
        virtual, gpipe = self.schedule.virtual, self.schedule.scheduler == "gpipe"
        chunks = self.schedule.chunks
        how = f"x{virtual}" * (virtual > 1) + f"-chunks{chunks}" * (chunks > 1) + "-gpipe" * gpipe
        stages = f"pipeline{self.layout.pipeline}"
        return name.replace(stages, stages + how)

    @property
    def degrees(self) -> dict[str, Any]:
        """The keys of `parallel_config` that stand for this way."""
        layout, shared = self.layout, self.layout.context > 1
        both = shared and self.row.splits is Splits.BOTH
        found: dict[str, Any] = {
            "data_parallel": layout.data,
            "model_parallel": layout.tensor,
            "use_seq_parallel": self.splits_tokens,
            "context_parallel": layout.context // layout.mesh_rows,
            "context_parallel_algo": self.row.name if shared else None,
            "ulysses_degree_in_cp": layout.ulysses if both else None,
            "expert_parallel": layout.experts,
        }
        if layout.pipeline > 1:
            found |= {
                "pipeline_stage": layout.pipeline,
                "pp_interleave_num": self.schedule.virtual,
                "pipeline_interleave": self.schedule.virtual > 1,
                "pipeline_scheduler": self.schedule.scheduler,
                "seq_split_num": self.schedule.chunks,
                "micro_batch_num": AUTO,
                "layers_per_stage": self.schedule.by_rank(layout.pipeline) or None,
            }
        if layout.is_mesh:
            found |= {"tensor_mesh": (layout.mesh_rows, layout.mesh_columns)}
        return found

    def step(self, step: StepShape) -> StepShape:
        """Return a step as it runs in this way."""
        layout, options = self.layout, step.options
        by_turns = (self.splits_tokens or layout.context > 1) and not layout.is_mesh
        first = options.first_layers
        if not isinstance(first, int | None) and not as_many(first, layout.pipeline, self.schedule):
            first = None  # its numbers are for another number of stages
        return step.under(
            algorithm=self.row,
            use_seq_parallel=self.splits_tokens,
            slices=options.slices if layout.is_mesh else None,
            copies=options.copies if by_turns else 1,
            micro_batch=self.rows,
            zero_stage=self.stage,
            recompute=self.recompute,
            first_layers=first,
            schedule=self.schedule,
        )

    def algorithm(self, step: StepShape, ranks_per_host: int) -> Algorithm:
        """Return the algorithm, with what it must know of a step, and its options as the step has
        them."""
        windows = [*attention_windows(step.model)]
        options = replace(step.options, schedule=self.schedule)
        return make_algorithm(
            self.row,
            self.layout.ulysses,
            self.layout.ring,
            keep=options.keeps_keys,
            window=windows[0] if len(windows) == 1 else None,
            per_host=ring_ranks_of_a_host(ranks_per_host, self.layout),
            **{name: getattr(options, key) for key, name in self.row.options.items()},
        )

    def placed(self, step: StepShape, hardware: Hardware, memo: Memo | None = None) -> PlacedStep:
        """Return a step in this way on a machine. step: as `self.step` returns it."""
        algorithm = self.algorithm(step, hardware.ranks_per_host)
        known = Memo() if memo is None else memo
        return PlacedStep(step, self.layout, hardware, algorithm, known)


@dataclass(frozen=True)
class Space:
    """The values that ways may have; None: any degree."""

    tensor: Collection[int] | None = None
    context: Collection[int] | None = None
    data: Collection[int] | None = None
    ulysses: Collection[int] | None = None
    algorithms: Collection[str] | None = None
    tokens: Collection[bool] = (False, True)
    """The values of use_seq_parallel."""
    flat: bool = True
    """Whether matrices may be split by Megatron's tensor parallelism."""
    meshes: bool = False
    """Whether matrices may be split on a mesh (MeshSlice)."""
    stages: Collection[int] = (1,)
    """The ZeRO stages."""
    rows: Collection[int] = (1,)
    recomputes: Collection[str] = ("nothing",)
    pipelines: Collection[int] | None = (1,)
    """The pipeline degrees."""
    schedulers: Collection[Scheduler] = (PLAIN.scheduler,)
    virtual: Collection[int] = (1, 2, 4)
    """The numbers of virtual stages per rank."""
    chunks: int = 1
    """The number of chunks that rows are cut into for a pipeline (`seq_split_num`)."""
    experts: Collection[int] | None = (1,)
    """The degrees of expert parallelism."""


WhyNot = Callable[[Way], str | None]
"""A function that returns a reason against a way, or None."""


@dataclass
class Ways:
    """The legal ways, and the numbers of illegal ones by reason."""

    legal: list[Way] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def ways(ranks: int, space: Space, why_not: WhyNot) -> Ways:
    """Return the ways of a space on `ranks` ranks against which `why_not` has no reason."""
    found = Ways()
    for way in every_way(ranks, space):
        if reason := why_not(way):
            found.left_out[reason] += 1
        else:
            found.legal.append(way)
    return found


def every_way(ranks: int, space: Space) -> Iterator[Way]:
    """Yield every way of a space, legal or not, without duplicates under several names."""
    for columns, rows, blocks, tokens in _matrices(ranks, space):
        left = ranks // (columns * rows)
        stages = _divisors(left, space.pipelines)
        for pipeline, context in (
            (p, c) for p in stages for c in _divisors(left // p, space.context)
        ):
            data = left // (pipeline * context)
            if space.data is not None and data not in space.data:
                continue
            every = product(space.schedulers, space.virtual) if pipeline > 1 else ()
            schedules = [Schedule(*how, chunks=space.chunks) for how in every] or [PLAIN]
            for row, ulysses in _sharing(rows * context, space):
                ring = rows * context // ulysses
                layout = Layout(columns, ulysses, ring, data, pipeline, rows, blocks)
                again = space.recomputes
                if ulysses == 1 and "exchange" in again:  # no heads are exchanged
                    again = [one for one in again if one != "exchange"] or ["nothing"]
                for experts in _divisors(layout.copies, space.experts):
                    divided = replace(layout, experts=experts)
                    for how in product(space.stages, space.rows, again, schedules):
                        yield Way(divided, row, tokens, *how)


def _matrices(ranks: int, space: Space) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield (mesh columns, mesh rows, whether matrices are in blocks, use_seq_parallel), unsplit
    matrices first."""
    for degree in _divisors(ranks, space.tensor):
        if degree == 1:
            yield 1, 1, False, False
            continue
        for tokens in space.tokens if space.flat else ():
            yield degree, 1, False, tokens
    for degree in _divisors(ranks, space.tensor) if space.meshes else ():
        for rows in _divisors(degree) if degree > 1 else ():
            yield degree // rows, rows, True, False


def _sharing(ranks: int, space: Space) -> Iterator[tuple[AlgorithmRow, int]]:
    """Yield the algorithms by which `ranks` ranks may share a row, and their Ulysses degrees.

    A hybrid is left out at degrees at which it equals an algorithm with a name of its own.
    """
    if ranks == 1:
        yield WHOLE, 1
        return
    for row in CONTEXT.values():
        if space.algorithms is not None and row.name not in space.algorithms:
            continue
        match row.splits:
            case Splits.HEADS:
                degrees = [ranks]
            case Splits.BOTH:
                least = 2 if row.ulysses_required else 1
                degrees = [one for one in _divisors(ranks) if least <= one < ranks]
            case _:
                degrees = [1]
        for ulysses in degrees:
            if space.ulysses is None or ulysses in space.ulysses:
                yield row, ulysses


def legal_for(step: StepShape, ranks_per_host: int, more: WhyNot | None = None) -> WhyNot:
    """Return the function that gives the reason why a way is illegal for a model's step, by its
    heads, rows and experts. more: gives further reasons."""
    model, tokens = step.model, step.row.length

    def why_not(way: Way) -> str | None:
        layout = way.layout
        heads = local_heads(model, layout.mesh_columns)
        if reason := why_no_stages(model, way) or why_no_matrices(model, layout):
            return reason
        if model.experts % layout.experts:
            return "the experts do not divide by the ranks that are to hold them"
        if layout.experts > 1 and way.stage == 0:
            return "ZeRO-0 is not available with expert parallelism"
        if heads.query < layout.ulysses:
            return "more ranks exchange heads than there are heads"
        for key, *_ in way.algorithm(step, ranks_per_host).problems(tokens, heads):
            if key.rpartition(".")[2] in way.row.options:
                return f"`{key}` is more than the ranks that share a row allow"
            return "the tokens of a row do not divide by the ranks that share it"
        if layout.data > step.step_rows:
            return "more replicas than rows of a step"
        if way.rows * layout.data > step.step_rows and way.rows > 1:
            return "more rows in a forward than a replica has"
        return more(way) if more else None

    return why_not


def why_no_stages(model: ModelShape, way: Way) -> str | None:
    """Return why a model's layers cannot be split into a way's stages, or None if they can."""
    if way.layout.pipeline == 1:
        return None
    if way.layout.pipeline * way.schedule.virtual > model.layers:
        return "more stages than layers"
    if FAMILIES[model.model_type].cut is None:
        return f"stages of {model.model_type} are not available"
    if model.joined_layers:
        return f"stages of {model.joined_layers} are not available"
    return "ZeRO-0 is not available with stages" if way.stage == 0 else None


def why_no_matrices(model: ModelShape, layout: Layout) -> str | None:
    """Return why a model's matrices cannot be split as in a layout, or None if they can."""
    if layout.tensor == 1:
        return None
    states, on_mesh = state_sizes(model), layout.is_mesh
    if model.routed and (states or on_mesh):
        where = "on a mesh" if on_mesh else "beside layers with a state"
        return f"matrices of experts are not split {where}"
    if states and on_mesh:
        return "layers with a state are not split on a mesh"
    if model.seeing_all and on_mesh:
        return "heads of two sizes are not split on a mesh"
    if states and layout.tensor > states.keys:
        return "more tensor ranks than key heads of layers with a state"
    for one in model.of_each_size:
        if not divide_heads(one.heads, one.kv_heads, layout.mesh_columns):
            return "the heads do not divide by the tensor ranks"
    if layout.is_mesh:
        sides = (layout.mesh_rows, layout.mesh_columns)
        if any(model.hidden_size % side for side in sides):
            return "the hidden size does not divide by the mesh"
    return None


def _divisors(number: int, among: Collection[int] | None = None) -> Sequence[int]:
    """Return the divisors of a number that are in `among`, rising."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    every = sorted({*small, *(number // d for d in small)})
    return [d for d in every if among is None or d in among]


MAX_LAYOUTS = 24
"""The number of layouts that `verify` tries without `--all`."""

Problems = Callable[["Recipe", Layout], list[Finding]]
"""A function that returns the findings against a recipe's `parallel_config` in its layout."""


@dataclass(frozen=True)
class Candidate:
    """A layout, with its `parallel_config`."""

    parallel: ParallelBlock
    layout: Layout
    reason: str | None = None
    """Why the layout is not tried, or None where it is."""
    key: str | None = None
    """The recipe key that the reason is about, if it is about one."""

    @property
    def name(self) -> str:
        """The name of its way, or, if strategies differ, the name of each."""
        every = each_alone(self.parallel) or [self.parallel]
        return " + ".join(dict.fromkeys(_asked(one, settled_layout(one)).name for one in every))


def candidates(recipe: Recipe, ranks: int, problems: Problems) -> list[Candidate]:
    """Return every algorithm at every degree on this many ranks, the recipe's own layout first.

    An algorithm is left out at degrees at which it equals another one. recipe: a resolved one,
    whose ZeRO stage and options of algorithms are used where they apply.
    """
    own = recipe.parallel_config
    space = Space(
        meshes=own.on_a_mesh,
        experts={1, own.expert_parallel},
        pipelines=(1,) if own.strategies else None,
        schedulers={schedule_of(own).scheduler},
        virtual=(1, 2),
        chunks=own.seq_split_num,
    )
    several = sorted(ways(ranks, space, _beyond).legal, key=lambda way: way.layout.pipeline)
    first, blocks = own, [_block(own, way) for way in several]
    if own.row_ranks == 1 and own.pipeline_stage == 1:
        tensor, experts = own.model_parallel, own.expert_parallel
        layout = Layout(tensor, data=ranks // tensor, blocks=own.on_a_mesh, experts=experts)
        first = _block(own, Way(layout, WHOLE, own.use_seq_parallel and tensor > 1))
    if own.strategies:
        first, blocks = own, [alike(block) for block in (first, *blocks)]

    def wrong_with(block: ParallelBlock, layout: Layout) -> list[Finding]:
        return problems(recipe.changed(parallel_config=block), layout)

    found: dict[tuple[str, Layout], Candidate] = {}
    for block in (first, *blocks):
        one = Candidate(block, settled_layout(block))
        if (one.name, one.layout) in found:
            continue
        wrong, bare = wrong_with(block, one.layout), _without_options(block)
        if wrong and bare != block:
            one, wrong = replace(one, parallel=bare), wrong_with(bare, one.layout)
        reason = "; ".join(what for _, what, _ in wrong) or None
        key = wrong[0][0] if wrong else None
        found[one.name, one.layout] = replace(one, reason=reason, key=key)
    return list(found.values())


def chosen(all_of_them: Sequence[Candidate], limit: int | None) -> list[Candidate]:
    """Return the same list with a reason for each candidate beyond the limit.

    The recipe's own comes first, then in turn one of each algorithm and context degree. limit:
    None: no limit.
    """
    legal = [one for one in all_of_them if one.reason is None]
    if limit is None or len(legal) <= limit:
        return list(all_of_them)
    kept, waiting = legal[:1], legal[1:]
    while len(kept) < limit:
        best = min(waiting, key=lambda one: _familiarity(one, kept))
        kept.append(best)
        waiting.remove(best)
    left_out = f"beyond the {limit} that are tried"
    return [replace(one, reason=left_out) if one in waiting else one for one in all_of_them]


def _familiarity(one: Candidate, kept: Sequence[Candidate]) -> int:
    """Return how often its algorithm and each of its degrees are among the chosen already."""
    traits = [
        (
            each.parallel.context_parallel_algo,
            each.layout.context,
            each.layout.ulysses,
            (each.parallel.use_seq_parallel, *each.layout.stored_as),
            (each.layout.pipeline, each.parallel.pp_interleave_num),
        )
        for each in (one, *kept)
    ]
    return sum(a == b for trait in traits[1:] for a, b in zip(traits[0], trait, strict=True))


def way_of(recipe: Recipe, layout: Layout) -> Way:
    """Return the way of a resolved recipe with one layout."""
    again = recipe.memory.recompute
    return replace(
        _asked(recipe.parallel_config, layout),
        stage=stage_of(recipe),
        rows=recipe.training.micro_batch_size,
        recompute=again if again in FORWARDS else "nothing",
    )


def _asked(parallel: ParallelBlock, layout: Layout) -> Way:
    """Return the part of a way that `parallel_config` sets."""
    row = row_of(parallel.context_parallel_algo, layout.context)
    tokens = parallel.use_seq_parallel and layout.tensor > 1
    return Way(layout, row, tokens, schedule=schedule_of(parallel))


def in_recipe(recipe: Recipe, way: Way) -> Recipe:
    """Return a recipe with the keys of a way, otherwise unchanged."""
    zero = {**recipe.deepspeed.zero_optimization, "stage": way.stage}
    memory, again = dict[str, object](), recipe.memory.gradient_checkpointing
    if again:
        memory["recompute"] = way.recompute
    if isinstance(again, tuple) and not as_many(again, way.layout.pipeline, way.schedule):
        memory["gradient_checkpointing"] = True
    return recipe.changed(
        parallel_config=_block(recipe.parallel_config, way),
        training={"micro_batch_size": way.rows},
        deepspeed={"zero_optimization": zero},
        memory=memory,
    )


def _block(own: ParallelBlock, way: Way) -> ParallelBlock:
    """Return `own` with the keys of a way."""
    update = dict(way.degrees)
    if update["context_parallel_algo"]:
        update["ulysses_degree_in_cp"] = way.layout.ulysses
    if not way.layout.is_mesh:
        in_one = next(name for name, row in TENSOR.items() if row.splits is Splits.MATRICES)
        update |= {"tensor_parallel_algo": in_one, **dict.fromkeys(MESH_OPTIONS)}
    options = _options(own, update["context_parallel_algo"])
    hides = way.splits_tokens or update["context_parallel"] > 1
    if way.layout.is_mesh or way.layout.tensor == 1 or not hides:
        update["fine_grain_interleave"] = 1
    return own.changed(**{**WITHOUT_STAGES, **update, **options})


def _beyond(way: Way) -> str | None:
    """Return why a way is not tried: virtual stages with unsplit rows do the same."""
    shared = way.layout.tensor * way.layout.context > 1
    return "virtual stages of shared rows" if way.schedule.virtual > 1 and shared else None


def _options(own: ParallelBlock, name: str | None) -> dict[str, Any]:
    """Return the options of all algorithms, null except those of the named one."""
    return {
        option: (getattr(own, option) or AUTO) if row.name == name else None
        for row in CONTEXT.values()
        for option in row.options
    }


def _without_options(block: ParallelBlock) -> ParallelBlock:
    """Return the block with its algorithm's options left open, and with one slice."""
    row = row_of(block.context_parallel_algo, block.row_ranks)
    slices = {"tensor_slices": (1, 1, 1, 1)} if block.on_a_mesh else {}
    return block.model_copy(update={**dict.fromkeys(row.options, AUTO), **slices})
