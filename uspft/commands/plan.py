"""`plan`: prints what a step will take by part, beside other layouts of the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uspft.commands.aligned import aligned
from uspft.commands.plan_memory import Beside, beside, memory_table, memory_unknown
from uspft.commands.plan_switching import switching_lines
from uspft.data import first_look
from uspft.launcher import planned_hosts
from uspft.layout import Layout
from uspft.metrics import as_size
from uspft.planner.alternatives import Prediction, alternatives
from uspft.planner.machine import Hardware
from uspft.planner.mesh_tuner import Tuning
from uspft.planner.step import NOT_PREDICTED
from uspft.planner.step_shape import StepShape
from uspft.prepare.data import tokenizer_here
from uspft.prepare.invocation import Invocation
from uspft.prepare.known import Weighed
from uspft.prepare.make_plan import examine_for_plan, hardware_of, own_layout, step_of
from uspft.prepare.weigh_strategies import has_strategies, weighed_here
from uspft.tensor.meshslice import PRODUCTS

COLUMNS = (
    ("products", ("products",)),
    ("attention", ("attention",)),
    ("rest", ("elementwise", "update")),
    ("all-to-all", ("all_to_all",)),
    ("keys", ("ring", "gather")),
    ("tensor", ("tensor",)),
    ("ZeRO", ("gradients", "weights")),
)
"""Head of a column, and the parts of a step that it adds up."""
LEGEND = (
    "seconds: products, attention and the rest (norms, loss, update) compute; all-to-all, keys, "
    "tensor and ZeRO move; hidden passes behind computing and is not in the step"
)
MEMORY_LEGEND = (
    "memory: with the recipe's keys of memory, without what attention kernels allocate inside"
)

MESH_LEGEND = (
    "seconds of the matrices, and of what the mesh moves for them, in one forward and backward; "
    "then the slices of each product"
)


def plan(target: Path, overrides: Sequence[str], place: Invocation, named: str | None) -> int:
    """Print the prediction, and write nothing. Raises RecipeError.

    named: the hardware that stands in for the recipe's, or None.
    """
    words = [*overrides, f"launch.hardware={named}"] if named is not None else overrides
    hosts = planned_hosts(place.environment)
    found = examine_for_plan(target, words, hosts, place.ranks)
    with found.placed():
        if has_strategies(found):
            sizes, recipe = step_of(found).model, found.here
            with tokenizer_here(recipe) as tokenizer:
                look = first_look(recipe.data, tokenizer, sizes.vocab_size)
            found = weighed_here(found, place, look.lengths)
        step = step_of(found)
    print(f"layout: {found.sentence}")
    if found.why_strategies:
        print(f"strategies: {found.why_strategies}")
    for line in found.strategies:
        print(f"strategy: {line}")
    print(f"hardware: {found.hardware}")
    if has_strategies(found):
        print(_several(found.known.weighed))
        return 0
    hardware = hardware_of(found, hosts)
    own = own_layout(found, step, hardware)
    others = [one for one in alternatives(step, own.layout.ranks, hardware) if one.name != own.name]
    print(_step(step))
    print(_parts(own))
    print()
    if tuning := found.tuning:
        print(_meshes(tuning, own.layout))
        print()
    every = beside(found.recipe, step.model, hardware, own, others)
    print(_table(step, hardware, every))
    print(LEGEND)
    if memory := memory_table(found.recipe, step.model, hardware, every):
        print(f"\n{memory}\n{MEMORY_LEGEND}\n")
    doubts = _doubts(found.recipe.model.dtype, hardware)
    doubts += memory_unknown(found.recipe, step.model, every)
    for line in (*doubts, *NOT_PREDICTED):
        print(f"not predicted: {line}")
    return 0


def _several(weighed: Weighed | None) -> str:
    """Return what several layouts in one step take, and every layout alone."""
    if weighed is None:
        what = "the lengths of the data are not known here before a run"
        return f"not predicted: several layouts in a step, since {what}"
    drawn = weighed.drawn
    source = f"drawn {len(drawn.steps)} times by the lengths of the {weighed.source}"
    head = f"step: {drawn.samples} samples, {source}"
    return "\n".join([head, *switching_lines(weighed.choice, drawn)])


def _step(step: StepShape) -> str:
    again = ", layers recomputed" if step.recompute else ""
    rows = f"{step.step_rows} row{'s' if step.step_rows > 1 else ''}"
    return f"step: {rows} of {step.row.length:,} tokens, each one document{again}"


def _doubts(dtype: str, hardware: Hardware) -> list[str]:
    measured = hardware.products.dtype
    return [] if measured == dtype else [f"{dtype}: the products' figures are those of {measured}"]


def _parts(own: Prediction) -> str:
    """Return the recipe's own step, part by part."""
    names = list(dict.fromkeys(part.name for part in own.time.parts))
    rows = [[f"by part ({own.name})", "seconds", "hidden", "bytes"]]
    for name in names:
        parts = [part for part in own.time.parts if part.name == name]
        seconds, hidden = sum(p.seconds for p in parts), sum(p.hidden for p in parts)
        moved = own.time.bytes_of(name)
        if seconds:
            cells = [_seconds(seconds), _seconds(hidden), as_size(int(moved)) if moved else "–"]
            rows.append([name.replace("_", "-"), *cells])
    rows.append(["step", _seconds(own.time.seconds), _seconds(own.time.hidden), ""])
    return aligned(rows)


def _meshes(found: Tuning, own: Layout) -> str:
    """Return a line for each mesh of the recipe's tensor ranks, and what speaks against others."""
    rows = [["mesh (rows × columns)", "seconds", "in one slice", *PRODUCTS]]
    for one in found.tried:
        recipes = one.shape == (own.mesh_rows, own.mesh_columns)
        times = _seconds(one.seconds), _seconds(one.whole_seconds)
        name = one.name + (" (the recipe's)" if recipes else "")
        rows.append([name, *times, *map(str, one.slices)])
    lines = [aligned(rows), MESH_LEGEND]
    lines += [f"no mesh: {why}" for why in found.refused]
    return "\n".join([*lines, *(f"not by the rule: {what}" for what in found.not_kept)])


def _table(step: StepShape, hardware: Hardware, layouts: Sequence[Beside]) -> str:
    """Return a line for each layout, the recipe's own first, without columns that are empty."""
    every = [layout.time for layout in layouts]
    columns = [c for c in COLUMNS if any(one.time.of(*c[1]) for one in every)]
    heads = ["layout", "step", *(head for head, _ in columns), "hidden", "tokens/s a rank", "MFU"]
    rows = [heads]
    for layout, one in zip(layouts, every, strict=True):
        mfu = one.mfu(step, hardware)
        rows.append(
            [
                layout.name,
                _seconds(one.time.seconds),
                *(_seconds(one.time.of(*names)) for _, names in columns),
                _seconds(one.time.hidden),
                f"{one.tokens_per_second_per_rank(step):,.0f}",
                "–" if mfu is None else f"{mfu:.2f}",
            ]
        )
    return aligned(rows)


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value else "–"
