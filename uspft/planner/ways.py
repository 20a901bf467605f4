"""The legal ways to run a step on some ranks: the only place that lists layouts.

A way is a layout with the algorithm that shares rows, and what else decides what a step takes and
needs: ZeRO's stage, rows in one forward, what is made again, the schedule of a pipeline. What is
left out is counted by its reason. `plan`, every `auto`, `strategies: auto` and `verify` all ask
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from uspft.config.algorithms import AUTO, CONTEXT, WHOLE, AlgorithmRow, Splits
from uspft.families import FAMILIES, NO_KEYS, ModelShape, state_sizes
from uspft.layout import Layout, ring_ranks_of_a_host
from uspft.pipeline.schedules import PLAIN, Schedule, Scheduler
from uspft.planner.step import local_heads
from uspft.planner.step_shape import StepShape
from uspft.sequence import FORWARDS, ONCE, Algorithm, make_algorithm
from uspft.tensor.parts import divide_heads


@dataclass(frozen=True)
class Way:
    """A layout with its algorithm, and how a step runs under it."""

    layout: Layout
    row: AlgorithmRow
    """Of the algorithm that shares rows."""
    splits_tokens: bool = False
    """Whether tensor ranks split the tokens between their matrices too."""
    stage: int = 1
    """ZeRO's."""
    rows: int = 1
    """Rows of one replica in one forward."""
    recompute: str = "nothing"
    schedule: Schedule = PLAIN
    """Of a pipeline's ranks; it says nothing where all layers are one stage."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the algorithm, by the fields of its class; what is not named is left to it."""

    @cached_property
    def name(self) -> str:
        """The layout's name, which tells it from other ways of the same options."""
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
        """What a recipe's `parallel_config` says of it."""
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
        """Return a step as it runs under this way."""
        forwards, layout = FORWARDS[self.recompute] if step.recompute else ONCE, self.layout
        by_turns = self.splits_tokens or layout.context > 1
        return replace(
            step,
            rows=self.rows,
            stage=self.stage,
            attention=forwards._replace(at_once=step.attention.at_once),
            use_seq_parallel=self.splits_tokens,
            slices=step.slices if layout.is_mesh else None,
            copies=step.copies if by_turns and not layout.is_mesh else 1,
            schedule=self.schedule,
        )

    def algorithm(self, step: StepShape, ranks_per_host: int) -> Algorithm:
        """Return the algorithm with the facts of a step."""
        windows = {*step.windows} - {NO_KEYS}
        return make_algorithm(
            self.row,
            self.layout.ulysses,
            self.layout.ring,
            keep=not step.recompute and step.attention.at_once is None,
            window=next(iter(windows)) if len(windows) == 1 else None,
            per_host=ring_ranks_of_a_host(ranks_per_host, self.layout),
            **dict(self.options),
        )


@dataclass(frozen=True)
class Space:
    """What may vary among ways; None stands for every degree."""

    tensor: Collection[int] | None = None
    context: Collection[int] | None = None
    data: Collection[int] | None = None
    ulysses: Collection[int] | None = None
    algorithms: Collection[str] | None = None
    tokens: Collection[bool] = (False, True)
    """Whether tensor ranks split the tokens between their matrices."""
    flat: bool = True
    """Whether matrices may be split in Megatron's way."""
    meshes: bool = False
    """Whether they may lie on a mesh of rows and columns."""
    stages: Collection[int] = (1,)
    """ZeRO's."""
    rows: Collection[int] = (1,)
    recomputes: Collection[str] = ("nothing",)
    pipelines: Collection[int] | None = (1,)
    """Ranks that layers are split over."""
    schedulers: Collection[Scheduler] = (PLAIN.scheduler,)
    virtual: Collection[int] = (1, 2, 4)
    """Stages of each of these ranks."""
    chunks: int = 1
    """Parts of a row that follow one another through them."""
    experts: Collection[int] | None = (1,)
    """Ranks that divide the experts of a layer."""


WhyNot = Callable[[Way], str | None]
"""A function that says what speaks against a way, or None."""


@dataclass
class Ways:
    """The ways that are legal, and how many are not, by reason."""

    legal: list[Way] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def ways(ranks: int, space: Space, why_not: WhyNot) -> Ways:
    """Return the ways of a space that are legal on so many ranks."""
    found = Ways()
    for way in every_way(ranks, space):
        if reason := why_not(way):
            found.left_out[reason] += 1
        else:
            found.legal.append(way)
    return found


def every_way(ranks: int, space: Space) -> Iterator[Way]:
    """Yield every way of a space, legal or not; each does something that no other does."""
    for columns, rows, blocks, tokens in _matrices(ranks, space):
        left = ranks // (columns * rows)
        for pipeline, context in _stages_and_sharers(left, space):
            data = left // (pipeline * context)
            if space.data is not None and data not in space.data:
                continue
            schedules = _schedules(space) if pipeline > 1 else [PLAIN]
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


def _stages_and_sharers(ranks: int, space: Space) -> Iterator[tuple[int, int]]:
    """Yield over how many ranks layers may be split, and how many may share a row then."""
    for pipeline in _divisors(ranks, space.pipelines):
        for context in _divisors(ranks // pipeline, space.context):
            yield pipeline, context


def _schedules(space: Space) -> list[Schedule]:
    several = product(space.schedulers, space.virtual)
    return [Schedule(*how, chunks=space.chunks) for how in several]


def _matrices(ranks: int, space: Space) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield mesh columns, mesh rows, whether matrices lie in blocks, and whether tokens are split
    between them; first of all those that split no matrix."""
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
    """Yield the algorithms that so many ranks may share a row by, and their Ulysses degrees.

    An algorithm is left out at degrees where another does the same under its own name.
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
    """Return what speaks against ways to run a model's step: its heads, its rows, its experts.
    more: what else does."""
    model, tokens = step.model, step.row.length

    def why_not(way: Way) -> str | None:
        layout = way.layout
        heads = local_heads(model, layout.mesh_columns)
        if reason := (
            why_no_stages(model, way)
            or why_no_matrices(model, layout)
            or why_no_experts(model, way)
        ):
            return reason
        if heads.query < layout.ulysses:
            return "more ranks exchange heads than there are heads"
        if way.algorithm(step, ranks_per_host).problems(tokens, heads):
            return "the tokens of a row do not divide by the ranks that share it"
        if layout.data > step.step_rows:
            return "more replicas than rows of a step"
        if way.rows * layout.data > step.step_rows and way.rows > 1:
            return "more rows in a forward than a replica has"
        return more(way) if more else None

    return why_not


def why_no_stages(model: ModelShape, way: Way) -> str | None:
    """Return why a model's layers cannot be split as a way does, or None where they can."""
    if way.layout.pipeline == 1:
        return None
    if way.layout.pipeline * way.schedule.virtual > model.layers:
        return "more stages than layers"
    if FAMILIES[model.model_type].cut is None:
        return f"stages of {model.model_type} are not available"
    if model.joined_layers:
        return f"stages of {model.joined_layers} are not available"
    if way.stage == 0:
        return "ZeRO-0 is not available beside stages"
    return None


def why_no_matrices(model: ModelShape, layout: Layout) -> str | None:
    """Return why a model's matrices cannot be split as a layout does, or None where they can."""
    if layout.tensor == 1:
        return None
    family = FAMILIES[model.model_type]
    if model.routed and (family.states or layout.is_mesh):
        where = "on a mesh" if layout.is_mesh else "beside layers with a state"
        return f"matrices of experts are not split {where}"
    states = state_sizes(model)
    if states and layout.is_mesh:
        return "layers with a state are not split on a mesh"
    if states and layout.tensor > states.keys:
        return "more tensor ranks than key heads of layers with a state"
    if model.seeing_all and layout.is_mesh:
        return "heads of two sizes are not split on a mesh"
    for one in model.of_each_size:
        if not divide_heads(one.heads, one.kv_heads, layout.mesh_columns):
            return "the heads do not divide by the tensor ranks"
    if layout.is_mesh:
        sides = (layout.mesh_rows, layout.mesh_columns)
        if any(model.hidden_size % side for side in sides):
            return "the hidden size does not divide by the mesh"
    return None


def why_no_experts(model: ModelShape, way: Way) -> str | None:
    """Return why ranks cannot divide a model's experts as a way does, or None where they can."""
    degree = way.layout.experts
    if degree == 1:
        return None
    if model.experts % degree:
        return "the experts do not divide by the ranks that are to hold them"
    return None if way.stage else "ZeRO-0 is not available beside experts that ranks divide"


def _divisors(number: int, among: Collection[int] | None = None) -> Sequence[int]:
    """Return the divisors of a number, rising, of those that are asked for."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    every = sorted({*small, *(number // d for d in small)})
    return [d for d in every if among is None or d in among]
