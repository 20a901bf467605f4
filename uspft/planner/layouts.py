"""The layouts in which `verify` runs a recipe: every way of so many ranks, as a recipe says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uspft.config import Finding, ParallelBlock
from uspft.config.algorithms import AUTO, CONTEXT, MESH_OPTIONS, TENSOR, Splits, row_of
from uspft.config.pipeline_rules import WITHOUT_STAGES
from uspft.config.strategies import alike, each_alone
from uspft.layout import Layout, layout_of
from uspft.planner.stages import as_many, schedule_of
from uspft.planner.ways import Space, Way, ways

if TYPE_CHECKING:
    from uspft.config import Recipe

MAX_LAYOUTS = 24
"""How many layouts are tried unless all are asked for."""

Problems = Callable[["Recipe", Layout], list[Finding]]
"""A function that returns what speaks against a recipe's `parallel_config` under its layout."""


@dataclass(frozen=True)
class Candidate:
    """A layout, with the `parallel_config` that asks for it."""

    parallel: ParallelBlock
    layout: Layout
    reason: str | None = None
    """Why the layout is not tried, or None where it is."""
    key: str | None = None
    """The key of the recipe that the reason is about; None where it is about none."""

    @property
    def name(self) -> str:
        """The layout's name: its algorithms, its degrees, and its data parallel degree above 1.

        With strategies that differ, it has the name of each.
        """
        if alike(self.parallel) != self.parallel:
            every = each_alone(self.parallel)
            return " + ".join(dict.fromkeys(Candidate(p, _layout(p)).name for p in every))
        parts = [str(self.parallel.context_parallel_algo or "whole rows")]
        if self.layout.ulysses > 1 and self.layout.ring > 1:
            parts.append(f"{self.layout.ulysses}×{self.layout.ring}")
        elif self.layout.context > 1:
            parts.append(str(self.layout.context))
        tokens = " with tokens" if self.parallel.use_seq_parallel else ""
        tensor = f", tensor {self.layout.tensor}{tokens}" if self.layout.tensor > 1 else ""
        if self.parallel.on_a_mesh:
            tensor = f", mesh {self.layout.mesh_rows} × {self.layout.mesh_columns}"
        virtual = self.parallel.pp_interleave_num
        ways = f" × {virtual}" if virtual > 1 else ""
        if (chunks := self.parallel.seq_split_num) > 1:
            ways += f" in {chunks} chunks"
        stages = f", stages {self.layout.pipeline}{ways}" if self.layout.pipeline > 1 else ""
        data = f", data {self.layout.data}" if self.layout.data > 1 else ""
        experts = f", experts {self.layout.experts}" if self.layout.experts > 1 else ""
        return " ".join(parts) + tensor + stages + data + experts


def candidates(recipe: Recipe, ranks: int, problems: Problems) -> list[Candidate]:
    """Return every algorithm at every degree on this many ranks, the recipe's own layout first.

    An algorithm is left out at degrees where another does the same under its own name. recipe: a
    resolved one, whose ZeRO stage and options of algorithms are kept where they apply.
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
    found_ways = sorted(ways(ranks, space, _beyond).legal, key=lambda way: way.layout.pipeline)
    blocks = [_block(own, way) for way in found_ways]
    left = ranks // own.model_parallel
    first = own if own.row_ranks > 1 or own.pipeline_stage > 1 else _whole(own, left)
    if own.strategies:
        first, blocks = own, [alike(block) for block in [first, *blocks]]
    found: dict[tuple[object, ...], Candidate] = {}
    for block in [first, *blocks]:
        layout = _layout(block)
        stages = layout.pipeline, block.pp_interleave_num
        how = block.context_parallel_algo, layout.ulysses, layout.ring, *_tensor(block), *stages
        key = (*how, layout.experts, block is own and alike(own) != own)
        if key not in found:
            wrong = _problems(recipe, block, problems)
            if wrong and (bare := _without_options(block)) != block:
                block, wrong = bare, _problems(recipe, bare, problems)
            reason = "; ".join(what for _, what, _ in wrong) or None
            found[key] = Candidate(block, layout, reason, wrong[0][0] if wrong else None)
    return list(found.values())


def chosen(all_of_them: Sequence[Candidate], limit: int | None) -> list[Candidate]:
    """Return the same list, in which those beyond the limit have it as their reason.

    The recipe's own is kept first, then in turn one of each algorithm and context degree. limit:
    None where there is none.
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
    """Return how often its algorithm and each of its degrees are kept already."""
    traits = [
        (
            each.parallel.context_parallel_algo,
            each.layout.context,
            each.layout.ulysses,
            _tensor(each.parallel),
            (each.layout.pipeline, each.parallel.pp_interleave_num),
        )
        for each in (one, *kept)
    ]
    return sum(a == b for trait in traits[1:] for a, b in zip(traits[0], trait, strict=True))


def _tensor(block: ParallelBlock) -> tuple[object, ...]:
    """Return how ranks split matrices under a block."""
    mesh = block.tensor_mesh if block.on_a_mesh else None
    return block.model_parallel, block.use_seq_parallel, mesh


def in_recipe(recipe: Recipe, way: Way) -> Recipe:
    """Return a recipe that asks for a way, and is the same in all else."""
    zero = {**recipe.deepspeed.zero_optimization, "stage": way.stage}
    changes: dict[str, Any] = {
        "parallel_config": _block(recipe.parallel_config, way),
        "training": recipe.training.model_copy(update={"micro_batch_size": way.rows}),
        "deepspeed": recipe.deepspeed.model_copy(update={"zero_optimization": zero}),
    }
    memory, again = recipe.memory, recipe.memory.gradient_checkpointing
    if memory.recompute != way.recompute and again:
        memory = memory.model_copy(update={"recompute": way.recompute})
    if isinstance(again, tuple) and not as_many(again, way.layout.pipeline, way.schedule):
        memory = memory.model_copy(update={"gradient_checkpointing": True})
    if memory is not recipe.memory:
        changes["memory"] = memory
    return recipe.model_copy(update=changes)


def _block(own: ParallelBlock, way: Way) -> ParallelBlock:
    """Return the block of one way, which is `own` in all else."""
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
    return own.model_copy(update={**WITHOUT_STAGES, **update, **options})


def _beyond(way: Way) -> str | None:
    """Return why a way is not tried: that virtual stages do the same with rows that are whole."""
    shared = way.layout.tensor * way.layout.context > 1
    return "virtual stages of shared rows" if way.schedule.virtual > 1 and shared else None


def _whole(own: ParallelBlock, data: int) -> ParallelBlock:
    """Return a block whose rows are whole, which is `own` in all else."""
    none = {"context_parallel_algo": None, "ulysses_degree_in_cp": None}
    update = {"data_parallel": data, "context_parallel": 1, **none, **_options(own, None)}
    if not own.use_seq_parallel:
        update["fine_grain_interleave"] = 1
    return own.model_copy(update=update)


def _options(own: ParallelBlock, name: str | None) -> dict[str, Any]:
    """Return the options of the algorithms, of which one's alone are kept."""
    return {
        option: (getattr(own, option) or AUTO) if row.name == name else None
        for row in CONTEXT.values()
        for option in row.options
    }


def _without_options(block: ParallelBlock) -> ParallelBlock:
    """Return the block with its algorithm's options left to the algorithm, and in one slice."""
    row = row_of(block.context_parallel_algo, block.row_ranks)
    slices = {"tensor_slices": (1, 1, 1, 1)} if block.on_a_mesh else {}
    return block.model_copy(update={**dict.fromkeys(row.options, AUTO), **slices})


def _problems(recipe: Recipe, block: ParallelBlock, problems: Problems) -> list[Finding]:
    return problems(recipe.model_copy(update={"parallel_config": block}), _layout(block))


def _layout(block: ParallelBlock) -> Layout:
    layout = layout_of(block, None)
    assert isinstance(layout, Layout)  # data_parallel is a number, and degrees divide
    return layout
