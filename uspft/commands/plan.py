"""The command `plan`: it prints the predicted time of a step by part, and that of other layouts for
the same ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from uspft.commands.plan_pages import (
    LEGEND,
    as_data,
    as_picture,
    in_characters,
    layouts_table,
    left_out_lines,
    machine_line,
    parts_table,
    shown,
    switching_lines,
    timeline_of,
)
from uspft.config import dump
from uspft.config.algorithms import CONTEXT
from uspft.config.messages import closest
from uspft.config.problems import UsageError, counted, writing
from uspft.data.corpus.prepare import first_look
from uspft.launcher.hosts import planned_hosts
from uspft.planner.rank import Ranked, Ranking
from uspft.planner.step import NOT_PREDICTED
from uspft.planner.step_shape import StepShape
from uspft.planner.ways import Way, in_recipe
from uspft.prepare.examine import Examined
from uspft.prepare.files import KEY
from uspft.prepare.host import Invocation
from uspft.prepare.known import Weighed
from uspft.prepare.left_open import open_keys
from uspft.prepare.make_plan import (
    examine_for_plan,
    has_strategies,
    ranking_of,
    sample_of,
    step_of,
    weighed_here,
)
from uspft.prepare.model import examine_model, must_be_built, tokenizer_here
from uspft.tensor.meshslice import PRODUCTS

ALGORITHMS = dict.fromkeys(row.short for row in CONTEXT.values())
ONLY = ("tensor", "mesh", "ulysses", *ALGORITHMS, "pipeline", "data")
"""The words of `--only`: dimensions along which a step can be split."""
TOP = 24
"""The default number of layouts to print (`--top`)."""


@dataclass(frozen=True)
class PlanAsked:
    """The options of the command `plan`."""

    hardware: str | None = None
    """A hardware file to use instead of the recipe's."""
    top: int | None = None
    only: tuple[str, ...] = ()
    as_json: bool = False
    take: int | None = None
    """The number, from 1, of the layout to write as a recipe or to draw."""
    file: Path | None = None
    """The file to write that recipe to."""
    picture: Path | None = None
    """The file for the picture of a pipeline's timeline."""

    def why_not(self, way: Way) -> str | None:
        """Return why a layout splits the step otherwise than `only` allows (data parallelism always
        is); None where it does not.
        """
        others = splits_of(way) - {*self.only, "data"}
        return "--only names other ways to split a step" if self.only and others else None

    def require_known(self) -> None:
        """Check that the options go together. Raises UsageError."""
        for word in self.only:
            if word not in ONLY:
                near = closest(word, ONLY)
                remedy = f"did you mean `{near}`?" if near else f"write some of {', '.join(ONLY)}"
                raise UsageError("--only", f"`{word}` is no way to split a step", remedy)
        if self.take is None and self.file is not None:
            raise UsageError("-o", "goes with --take N", "write --take N too")
        if self.take is not None and not (self.file or self.picture):
            what = "goes with -o FILE or --timeline FILE"
            raise UsageError("--take", what, "write one of them too")
        for option, file in (("-o", self.file), ("--timeline", self.picture)):
            if file and file.exists():
                raise UsageError(option, f"`{file}` is there already", "name another file")


def splits_of(way: Way) -> set[str]:
    """Return the words of `--only` for the dimensions along which a layout splits a step."""
    layout = way.layout
    degrees = {
        "mesh" if layout.is_mesh else "tensor": layout.tensor,
        "ulysses": layout.ulysses,
        way.row.short: layout.ring // layout.mesh_rows,
        "pipeline": layout.pipeline,
        "data": layout.data,
    }
    return {word for word, degree in degrees.items() if degree > 1}


def plan(target: Path, overrides: Sequence[str], place: Invocation, asked: PlanAsked) -> int:
    """Print the prediction, and write only the recipe or picture that is asked for. Raises
    RecipeError and UsageError."""
    asked.require_known()
    named = asked.hardware
    words = [*overrides, f"launch.hardware={named}"] if named is not None else overrides
    found = examine_for_plan(target, words, planned_hosts(place.environment), place.ranks)
    with found.placed():
        if found.shape and must_be_built(found.here):
            examine_model(found.here)
        if has_strategies(found):
            sizes, recipe = step_of(found).model, found.here
            with tokenizer_here(recipe) as tokenizer:
                look = first_look(recipe.data, tokenizer, sizes.vocab_size)
                found = weighed_here(found, place, tokenizer, look.lengths)
        step = step_of(found)
        if not has_strategies(found):
            step = replace(step, sample=sample_of(found, place))
    if has_strategies(found):
        print("\n".join([*found.settled, _several(found.known.weighed)]))
        return 0
    order = ranking_of(found, step, asked.why_not)
    taken = asked.take and _taken(order, asked.take)
    if taken and taken.layout.pipeline == 1 and asked.picture:
        what = f"is {asked.take}, and {taken.name} has one stage"
        raise UsageError("--take", what, "write the number of a layout of several stages")
    drawn = asked.picture and (taken or _first_pipeline(order))
    if asked.as_json:
        every, first = shown(order, asked.top), asked.top or TOP
        print(json.dumps(as_data(order, every, found.recipe, found.hardware, first), indent=1))
    else:
        print("\n".join(_page(found, step, order, shown(order, asked.top or TOP))))
    beside = sys.stderr if asked.as_json else sys.stdout  # stdout is then JSON only
    if taken and asked.file:
        with writing(str(asked.file), "name another file by -o FILE"):
            recipe = in_recipe(found.loaded.recipe, taken.way)
            if KEY not in found.loaded.origins.places:  # else it would go on from the first's run
                recipe = recipe.changed(output_dir=Path("outputs") / asked.file.stem)
            asked.file.write_text(dump(recipe), "utf-8")
        where = f"{asked.file}, with output_dir {recipe.output_dir}"
        print(f"written: {taken.name} to {where}", file=beside)
    if drawn and asked.picture:
        with writing(str(asked.picture), "name another file by --timeline FILE"):
            asked.picture.write_text(as_picture(timeline_of(drawn)), "utf-8")
        print(f"drawn: {drawn.name} in {asked.picture}", file=beside)
    return 0


def _page(
    found: Examined, step: StepShape, order: Ranking, every: Sequence[Ranked]
) -> Iterator[str]:
    """Yield the parts of the printed page."""
    hardware = order.layouts[0].hardware
    yield f"layout: {found.sentence}"
    yield f"hardware: {found.hardware}"
    yield machine_line(hardware, found.layout.ranks)
    yield f"{_step(step)}\n"
    yield layouts_table(order, every, open_keys(found.loaded.recipe))
    if more := len(order.layouts) - len(every):
        yield f"and {more} more (--top N)"
    yield LEGEND
    yield from left_out_lines(order.left_out)
    first = order.layouts[0]
    for one in [first, *([order.own] if order.own and order.own is not first else [])]:
        yield f"\n{parts_table(one)}"
        if slices := one.step.options.slices:
            each = zip(PRODUCTS, slices, strict=True)
            yield f"slices: {', '.join(f'{name} {count}' for name, count in each)}"
        if one.layout.pipeline > 1:
            yield f"\n{in_characters(timeline_of(one))}"
    yield ""
    dtype, measured = found.recipe.model.dtype, hardware.products.dtype
    doubts = [f"{dtype}: the products' figures are those of {measured}"] * (dtype != measured)
    for line in (*doubts, *NOT_PREDICTED):
        yield f"not predicted: {line}"


def _taken(order: Ranking, number: int) -> Ranked:
    """Return the layout with a number. Raises UsageError where there is none."""
    if number > len(order.layouts):
        what = f"is {number}, and there are {len(order.layouts)} layouts"
        raise UsageError("--take", what, "write a number of the table")
    return order.layouts[number - 1]


def _first_pipeline(order: Ranking) -> Ranked:
    """Return the first layout with pipeline stages. Raises UsageError where there is none."""
    for one in order.layouts:
        if one.layout.pipeline > 1:
            return one
    raise UsageError("--timeline", "no layout here has several stages", "leave it out")


def _several(weighed: Weighed | None) -> str:
    """Return the prediction for several layouts in one step, and for each layout alone."""
    if weighed is None:
        what = "the lengths of the data are not known here before a run"
        return f"not predicted: several layouts in a step, since {what}"
    drawn = weighed.drawn
    source = f"drawn {len(drawn.steps)} times by the lengths of the {weighed.source}"
    head = f"step: {drawn.samples} samples, {source}"
    return "\n".join([head, *switching_lines(weighed.choice, drawn)])


def _step(step: StepShape) -> str:
    again = ", layers recomputed" if step.options.checkpointing else ""
    documents = "each priced as one document, since the data is not here"
    if drawn := step.sample:
        rows = counted(len(drawn.rows), "row")
        documents = f"priced by {rows} of {drawn.source}, of {drawn.documents:.3g} documents"
    rows = counted(step.step_rows, "row")
    return f"step: {rows} of {step.row.length:,} tokens, {documents}{again}"
