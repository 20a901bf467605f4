"""Every `auto` of a recipe is settled here: a function for each key, asked again as more is known.

A function returns the recipe as it is where nothing is to be settled, or where what it needs is not
known yet. The recipe's reference tells which `auto` stays for good: that of `checkpoint.resume`,
and of algorithms' options whose `auto` means what no value says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from uspft.config import ParallelBlock, Recipe
from uspft.config.algorithms import (
    AUTO,
    CONTEXT,
    MESH_OPTIONS,
    ON_A_MESH,
    Splits,
    every_option,
    row_of,
)
from uspft.config.strategies import degrees_of, strategies_of, under
from uspft.families import with_factor
from uspft.layout import Layout, context_degrees, layout_of
from uspft.planner.auto import Choice, recommend
from uspft.planner.memory import options_of
from uspft.planner.mesh_tuner import Tuning, shapes_of, tune
from uspft.planner.ways import Space, Way
from uspft.prepare.chosen_layouts import with_layouts
from uspft.prepare.known import Known
from uspft.prepare.memory_need import settled_memory
from uspft.prepare.new_tokens import with_vocabulary
from uspft.prepare.pipelines import with_stages
from uspft.prepare.step import recomputes_of, slices_of, stage_of, step_shape
from uspft.segments import Segments
from uspft.sequence import Heads, of_recipe


def resolve(recipe: Recipe, known: Known) -> Recipe:
    """Return the recipe with everything settled that can be."""
    for settle in SETTLED.values():
        recipe = settle(recipe, known)
    return with_vocabulary(recipe, known.shape)


def _strategies(recipe: Recipe, known: Known) -> Recipe:
    """Settle what strategies leave open; the degrees beside them are those of the longest rows.

    Each is settled as a recipe of its own whose rows have its length, on as many processes as the
    longest rows' layout has. `auto` becomes a list, or one layout, once the choice is known.
    """
    if recipe.parallel_config.strategies == AUTO and known.weighed:
        recipe = with_layouts(recipe, known.weighed)
    every, parallel = strategies_of(recipe), recipe.parallel_config
    if parallel.strategies is None:
        return _with(recipe, "parallel_config", switching=None)
    if not every:
        return recipe
    keys = ["tensor_mesh", "context_parallel_algo", "data_parallel", "exchange_stages"]
    keys, found = [*keys, "micro_batch_num"], []
    longest = under(recipe, len(every) - 1)
    ranks = ranks_of(recipe, known)
    if ranks is None and isinstance(layout := layout_of(longest.parallel_config, None), Layout):
        ranks = layout.ranks
    work = known.work
    for number, strategy in enumerate(every):
        alone = under(recipe, number)
        row = Segments.single(alone.data.sequence_length)
        here = replace(known, ranks=ranks, work=work and work._replace(rows=[row]))
        for key in keys:
            alone = SETTLED[f"parallel_config.{key}"](alone, here)
        found.append(strategy.model_copy(update=degrees_of(alone.parallel_config)))
    update = {**degrees_of(found[-1]), "strategies": tuple(found)}
    if parallel.switching in (AUTO, None):
        update["switching"] = "in_place"
    return _with(recipe, "parallel_config", **update)


def choice(recipe: Recipe, known: Known) -> Choice | None:
    """Return what `context_parallel_algo: auto` means, and why.

    It is the first of the planner's order. Returns None where the recipe names an algorithm, or
    where ranks do not share a row.
    """
    parallel, model = recipe.parallel_config, known.shape
    if parallel.context_parallel_algo != AUTO or parallel.row_ranks == 1:
        return None
    likely = _likely(parallel)
    if model is None or known.cluster is None:
        unknown = "the model's heads" if model is None else "the cluster"
        why = f"only keys that attention needs travel; {unknown}, not known yet, may change this"
        return Choice(likely, why)
    mesh = parallel.tensor_mesh if parallel.on_a_mesh else None
    on_mesh = isinstance(mesh, tuple)
    space = Space(
        tensor={parallel.model_parallel},
        context={parallel.context_parallel},
        tokens={parallel.use_seq_parallel},
        flat=not on_mesh,
        meshes=on_mesh,
        stages={stage_of(recipe)},
        rows={recipe.training.micro_batch_size},
        recomputes=recomputes_of(recipe, recipe.launch.device),
    )

    def other_mesh(way: Way) -> str | None:
        shape = way.layout.mesh_rows, way.layout.mesh_columns
        return "another mesh is asked for" if on_mesh and shape != mesh else None

    work = known.work
    step = step_shape(recipe, model, work.windows if work else ())
    step = replace(step, slices=step.slices or (1,) * 4) if on_mesh else step
    ranks = ranks_of(recipe, known) or prod((parallel.model_parallel, parallel.context_parallel))
    hardware = known.cluster.hardware.on_hosts_of(-(-ranks // known.hosts))
    rows = work.rows if work else [step.row]
    tiled = settled_memory(recipe, model, None, None)
    options = options_of(tiled, Layout())
    found = recommend(step, ranks, space, hardware, rows, options, why_not=other_mesh)
    if found is None:
        return Choice(likely, "no algorithm splits these rows over so many ranks")
    if work is None and recipe.data.packing != "none":
        unknown = "for rows of one document; the documents' lengths, not known yet, may change this"
        return found._replace(why=f"{found.why}, {unknown}")
    return found


def _likely(parallel: ParallelBlock) -> Way:
    """Return the way that is taken where nothing tells ways apart: keys go where they are used."""
    row = next(row for row in CONTEXT.values() if row.automatic and row.splits is Splits.BOTH)
    columns = parallel.model_parallel // parallel.mesh_rows
    return Way(Layout(columns, ring=parallel.row_ranks, mesh_rows=parallel.mesh_rows), row)


def tuning(recipe: Recipe, known: Known) -> Tuning | None:
    """Return what the tuner finds for a recipe whose matrices lie on a mesh.

    Returns None where they do not, or where the model or the cluster is not known.
    """
    parallel, model = recipe.parallel_config, known.shape
    if not parallel.on_a_mesh or model is None or known.cluster is None:
        return None
    degrees = parallel.model_parallel, parallel.context_parallel
    ranks = ranks_of(recipe, known) or prod(degrees)
    step = step_shape(recipe, model)
    return tune(
        step,
        (*degrees, max(1, ranks // prod(degrees))),
        known.cluster.hardware.on_hosts_of(-(-ranks // known.hosts)),
        slices=slices_of(parallel),
        why_not=lambda rows, columns: _why_not(recipe, known, (rows, columns)),
    )


def ranks_of(recipe: Recipe, known: Known) -> int | None:
    """Return how many processes all hosts have together, or None where nothing tells.

    The command tells, or else the recipe, or else the GPUs of this machine.
    """
    if known.ranks:
        return known.ranks
    if recipe.launch.processes != AUTO:
        return int(recipe.launch.processes) * known.hosts
    here = known.gpus if recipe.launch.device == "cuda" else 0
    return here * known.hosts or None


def _with(recipe: Recipe, block: str, **values: Any) -> Recipe:
    held = getattr(recipe, block).model_copy(update=values)
    return recipe.model_copy(update={block: held})


def _device(recipe: Recipe, known: Known) -> Recipe:
    if recipe.launch.device != AUTO:
        return recipe
    return _with(recipe, "launch", device="cuda" if known.gpus else "cpu")


def _hardware(recipe: Recipe, known: Known) -> Recipe:
    if recipe.launch.hardware != AUTO or known.cluster is None:
        return recipe
    return _with(recipe, "launch", hardware=known.cluster.hardware.name)


def _attention(recipe: Recipe, known: Known) -> Recipe:
    """Settle the kernel: on CPU there is only one, on GPUs ranks try those that are installed."""
    kernel = "torch" if recipe.launch.device == "cpu" else known.kernel
    if recipe.model.attention != AUTO or kernel is None:
        return recipe
    return _with(recipe, "model", attention=kernel)


def _scaling(recipe: Recipe, known: Known) -> Recipe:
    """Settle the factor of a rope scaling that has none: it is as large as rows need."""
    if known.shape is None:
        return recipe
    model = with_factor(recipe.model, known.shape, recipe.data.sequence_length)
    return recipe.model_copy(update={"model": model})


def _format(recipe: Recipe, known: Known) -> Recipe:
    """Settle one format for all sources, or where they differ, one for each."""
    data, found = recipe.data, known.formats
    if not found:
        return recipe
    if len(set(found)) == 1:
        return _with(recipe, "data", format=found[0])
    pairs = zip(data.train + (data.eval or ()), found, strict=True)
    named = tuple(s.model_copy(update={"format": s.format or f}) for s, f in pairs)
    train, rest = named[: len(data.train)], named[len(data.train) :]
    return _with(recipe, "data", train=train, eval=rest or None)


def _algorithm(recipe: Recipe, known: Known) -> Recipe:
    """Settle the algorithm; where rows or model are not known yet, it is the most likely one.

    Mesh rows share a row of tokens also where the recipe does not say how.
    """
    parallel = recipe.parallel_config
    if parallel.context_parallel_algo is None and parallel.on_a_mesh and parallel.row_ranks > 1:
        return _with(recipe, "parallel_config", context_parallel_algo=ON_A_MESH)
    if parallel.context_parallel_algo != AUTO:
        return recipe
    found = choice(recipe, known)
    if found is None:
        return _with(recipe, "parallel_config", context_parallel_algo=None)
    keys = ("context_parallel_algo", "ulysses_degree_in_cp")
    return _with(recipe, "parallel_config", **{key: found.way.degrees[key] for key in keys})


def _layout(recipe: Recipe, known: Known) -> Layout | None:
    found = layout_of(recipe.parallel_config, ranks_of(recipe, known))
    return found if isinstance(found, Layout) else None


def _replicas(recipe: Recipe, known: Known) -> Recipe:
    layout = _layout(recipe, known)
    if recipe.parallel_config.data_parallel != AUTO or layout is None:
        return recipe
    return _with(recipe, "parallel_config", data_parallel=layout.data)


def _processes(recipe: Recipe, known: Known) -> Recipe:
    layout, is_open = _layout(recipe, known), recipe.parallel_config.strategies == AUTO
    if layout is None or (recipe.launch.processes != AUTO and known.ranks is None):
        return recipe
    if is_open and ranks_of(recipe, known) is None:  # the degrees do not tell
        return recipe
    return _with(recipe, "launch", processes=layout.ranks // known.hosts)


def _options(recipe: Recipe, known: Known) -> Recipe:
    """Set options that do not apply to null; those of the algorithm that are `auto` stay so."""
    parallel = recipe.parallel_config
    layout = _layout(recipe, known)
    if layout is None:
        return recipe
    row = row_of(parallel.context_parallel_algo, layout.context)
    off = dict.fromkeys(every_option(CONTEXT) - row.options_at(layout.ring))
    if not parallel.on_a_mesh:
        off |= dict.fromkeys(MESH_OPTIONS)
    return _with(recipe, "parallel_config", **off)


def _mesh(recipe: Recipe, known: Known) -> Recipe:
    """Settle mesh and slices: tuned, or the middle one of those that Ulysses divides, in one slice,
    where the cluster is not known yet or no mesh fits."""
    parallel = recipe.parallel_config
    if not parallel.on_a_mesh or known.shape is None:
        return recipe
    mesh, found = parallel.tensor_mesh, tuning(recipe, known)
    if isinstance(mesh, tuple):
        best = found and found.on(mesh)
    else:
        best = found.tried[0] if found and found.tried else None
        shapes = [
            (rows, columns)
            for rows, columns in shapes_of(parallel.model_parallel)
            if rows * parallel.context_parallel % (parallel.ulysses_degree_in_cp or 1) == 0
        ]
        mesh = best.shape if best else shapes[(len(shapes) - 1) // 2]
    slices = slices_of(parallel) or (best.slices if best else (1,) * 4)
    return _with(recipe, "parallel_config", tensor_mesh=mesh, tensor_slices=slices)


def _why_not(recipe: Recipe, known: Known, shape: tuple[int, int]) -> str | None:
    """Return why attention cannot be shared by the rows of a mesh, or None where it can."""
    tried = _algorithm(_with(recipe, "parallel_config", tensor_mesh=shape), known)
    parallel = tried.parallel_config
    ulysses = parallel.ulysses_degree_in_cp or 1
    if parallel.row_ranks % ulysses:
        return f"a row is shared by {parallel.row_ranks}, which Ulysses {ulysses} does not divide"
    ring = Layout(shape[1], *context_degrees(parallel), mesh_rows=shape[0])
    assert known.shape  # else nothing is tuned
    heads = Heads(known.shape.heads, known.shape.kv_heads, known.shape.head_dim).on(shape[1])
    wrong = of_recipe(tried, ring).problems(recipe.data.sequence_length, heads)
    return wrong[0][1] if wrong else None


def _memory(recipe: Recipe, known: Known) -> Recipe:
    """Settle what is made again or done in tiles, so that a run fits."""
    if known.shape is None:
        return recipe
    hardware = known.cluster and known.cluster.hardware
    return settled_memory(recipe, known.shape, _layout(recipe, known), hardware)


def _stages(recipe: Recipe, known: Known) -> Recipe:
    layout = _layout(recipe, known)
    return with_stages(recipe, layout, known) if layout else recipe


SETTLED: Mapping[str, Callable[[Recipe, Known], Recipe]] = {
    "launch.device": _device,
    "launch.hardware": _hardware,
    "model.attention": _attention,
    "model.rope_scaling": _scaling,
    "data.format": _format,
    "parallel_config.tensor_mesh": _mesh,
    "parallel_config.tensor_slices": _mesh,
    "parallel_config.context_parallel_algo": _algorithm,
    "parallel_config.data_parallel": _replicas,
    "parallel_config.micro_batch_num": _stages,
    "parallel_config.pipeline_scheduler": _stages,
    "parallel_config.pipeline_interleave": _stages,
    "parallel_config.layers_per_stage": _stages,
    "parallel_config.strategies": _strategies,
    "parallel_config.switching": _strategies,
    "launch.processes": _processes,
    "parallel_config.exchange_stages": _options,
    "memory.loss_tile_tokens": _memory,
    "memory.mlp_tile_tokens": _memory,
    "memory.recompute": _memory,
}
"""The function that settles each key, in the order in which one needs another."""
