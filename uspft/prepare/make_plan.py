"""A recipe as the planner's input: its step, its cluster, its own layout, and the predicted costs
by which rows are assigned to layouts; and the predicted time of `strategies` for the lengths of the
data, by which `auto` chooses, and which `plan` prints. The steps of a run follow from its data
too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from uspft.config import Fault, Recipe, read
from uspft.config.algorithms import AUTO
from uspft.config.strategies import KEY, strategies_of
from uspft.data.corpus.corpus import corpora_in
from uspft.data.corpus.prepare import first_look, prepared
from uspft.data.rows.stream import training_rows
from uspft.job import ChunkPrices, Prices
from uspft.launcher.hosts import host_memory
from uspft.launcher.meeting import Meeting
from uspft.planner.machine import Hardware
from uspft.planner.options import options_of
from uspft.planner.rank import Ranking, ranking
from uspft.planner.row_time import chunk_prices
from uspft.planner.step import micro_step_seconds
from uspft.planner.step_shape import DrawnRows, StepShape
from uspft.planner.ways import Space, Way, WhyNot, way_of
from uspft.prepare.examine import Examined, examine
from uspft.prepare.files import find_paths
from uspft.prepare.host import Invocation
from uspft.prepare.known import Weighed, cluster_of, saving_most, step_shape
from uspft.prepare.layout_findings import exchange_findings, run_findings
from uspft.prepare.left_open import SLICES, open_keys, space_of, wrong_in
from uspft.prepare.model import tokenizer_here, tokenizer_of
from uspft.prepare.remarks import says_layers
from uspft.segments import Segments
from uspft.switching.choose.choice import beside_static, choose
from uspft.switching.choose.drawn_steps import DrawnSteps, segments_of
from uspft.switching.choose.layout_set import LayoutSet
from uspft.switching.choose.priced import PricedLayout, Setting, priced
from uspft.switching.deal.micro_steps import rows_of_samples


def examine_for_plan(
    target: Path, overrides: Sequence[str], hosts: int, ranks: int | None
) -> Examined:
    """Examine the recipe for the device of the hardware that it names, regardless of this
    machine."""
    launch = find_paths(read(target, overrides)).recipe.launch
    if launch.device == AUTO and launch.hardware != AUTO:
        cluster, findings = cluster_of(launch.hardware, "cpu", None)
        if cluster and not findings:
            device = "cuda" if cluster.hardware.device else "cpu"
            overrides = [*overrides, f"launch.device={device}"]
    return examine(target, overrides, hosts, ranks, trains=False)


def hardware_of(found: Examined) -> Hardware:
    """Return the cluster's figures for this run's number of ranks."""
    return found.known.hardware_on(found.layout.ranks)


def step_of(found: Examined) -> StepShape:
    """Return the recipe's step, with rows of one document each.

    Raises Fault where the model's config is not on this machine.
    """
    if found.shape is None:
        what = f"the sizes of {found.recipe.model.name_or_path} are not on this machine"
        raise Fault([("model.name_or_path", what, "name its folder, or a model of configs/models")])
    return step_shape(found.recipe, found.shape)


def own_way(found: Examined) -> Way:
    """Return the recipe's own layout and algorithm, and how its step runs."""
    way = way_of(found.recipe, found.layout)
    if says_layers(found.loaded.recipe):
        return way
    # The stages are balanced by the rows that the step is predicted for.
    return replace(way, schedule=way.schedule._replace(sizes=()))


def ranking_of(found: Examined, step: StepShape, among: WhyNot = lambda _: None) -> Ranking:
    """Return every layout for the recipe's ranks that its other keys allow, ranked by predicted
    time. among: a further check that excludes layouts, except the recipe's own."""
    own, recipe, hardware = own_way(found), found.recipe, hardware_of(found)
    asked = found.loaded.recipe.model_copy(update={"launch": recipe.launch})
    left = space_of(asked)
    space = Space(
        experts=None if step.model.experts > 1 else {1},
        meshes=recipe.parallel_config.on_a_mesh,
        stages=left.stages,
        rows=left.rows,
        recomputes=left.recomputes,
        pipelines=None,
        schedulers={own.schedule.scheduler},
        virtual={1, 2, 4, own.schedule.virtual},
        chunks=own.schedule.chunks,
    )
    opened = open_keys(asked)
    if SLICES in opened:  # each mesh has its own best slices
        step = step.under(slices=None)
    wrong = wrong_in(recipe, step.model, opened)

    def why_not(way: Way) -> str | None:
        return among(way) or wrong(way)

    saving = partial(saving_most, asked.memory, step.model)
    how: dict[str, Any] = {"own": own, "why_not": why_not, "saving": saving}
    return ranking(step, found.layout.ranks, space, hardware, **how)


def chunk_prices_of(found: Examined) -> ChunkPrices | None:
    """Return the costs by which a recipe's rows are cut into chunks of equal time; None if they are
    not."""
    parallel, way = found.recipe.parallel_config, own_way(found)
    if parallel.seq_split_num == 1 or parallel.sequence_chunks != "time":
        return None
    return chunk_prices(way.placed(way.step(step_of(found)), hardware_of(found)))


def prices_of(found: Examined) -> Prices | None:
    """Return the predicted costs of rows under a recipe's strategies; None if it has one layout.

    A row's time is linear in its pairs of query and key, through the times of a row without
    documents and of a row with a single one.
    """
    if not strategies_of(found.recipe):
        return None
    setting = _setting(found)
    every = _priced_each(found, setting, lambda length: Segments((0,), length))
    rows, pairs = zip(*(one.line for one in every), strict=True)
    stored = min((one.layout for one in every), key=lambda layout: layout.tensor)
    together = micro_step_seconds(setting.placed(stored))
    taken = tuple(one.row_bytes for one in every)
    return Prices(rows, pairs, max(one.beside for one in every), together, taken)


LOOKED_AT = 16_384
"""The most samples whose lengths are read, evenly spaced over an epoch."""


def lengths_of(recipe: Recipe, corpus: Path) -> list[int]:
    """Return the lengths in tokens of the samples that a recipe trains on, or of LOOKED_AT of them.

    A sample that `overlong: split` cuts counts as its documents, and sources count by their weight.
    """
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=True)
    every = range(stream.rows_in_epoch(0))
    return [stream.tokens_of(number) for number in _spread(every, LOOKED_AT)]


def course_of(recipe: Recipe, corpus: Path) -> dict[str, Any]:
    """Return the job's fields on how many steps the whole run has, and in which of them intervals
    of epochs end; the corpus is read only where the recipe counts epochs."""
    training, course = recipe.training, dict[str, Any](steps=recipe.training.steps)
    if not counts_epochs(recipe):
        return course
    switches, each = bool(strategies_of(recipe)), training.global_batch_size
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    if training.epochs:
        course["steps"] = stream.steps_in_epochs(training.epochs, each)
    for name, epochs in (
        ("saved_by_epochs", recipe.checkpoint.every_epochs),
        ("evaluated_by_epochs", training.eval_every_epochs),
    ):
        if epochs:
            course[name] = stream.steps_of_ends(epochs, each, course["steps"])
    return course


def counts_epochs(recipe: Recipe) -> bool:
    """Tell whether a recipe's length or intervals are in epochs."""
    training = recipe.training
    return bool(training.epochs or training.eval_every_epochs or recipe.checkpoint.every_epochs)


def corpus_here(found: Examined, place: Invocation, tokenizer: str | None) -> Path | None:
    """Return the folder of a recipe's data if it is tokenised already; None otherwise, or where
    that is unknown without a network. Nothing is written.

    tokenizer: its folder, as from `tokenizer_here`. Raises DataError.
    """
    recipe = found.here
    if found.known.corpus:
        return found.known.corpus
    if found.shape is None or (tokenizer is None and tokenizer_of(recipe.model)):
        return None
    cache = place.data_cache(recipe)
    if not corpora_in(cache):  # to look for the folder, all files are hashed
        return None
    return prepared(recipe.data, tokenizer, found.shape.vocab_size, cache)


def weighed_here(
    found: Examined, place: Invocation, tokenizer: str | None, looked_at: Sequence[int]
) -> Examined:
    """Return the examination of a recipe with strategies with their predicted time, by the lengths
    that are known before a run; unchanged where none are.

    tokenizer: its folder, as from `tokenizer_here`. looked_at: lengths of the first records, for
    data that is not tokenised yet. Raises as `weighing` does, and DataError.
    """
    if corpus := corpus_here(found, place, tokenizer):
        return weighing(found, lengths_of(found.here, corpus))
    lengths, source = documents_of(found.recipe, looked_at), "first records"
    return weighing(found, lengths, source=source) if lengths else found


def documents_of(recipe: Recipe, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the documents that samples become under `data.overlong`."""
    most, how = recipe.data.sequence_length, recipe.data.overlong
    cut = [min(length, most) for length in lengths if how != "drop" or length <= most]
    for length in lengths if how == "split" else ():
        if length > most:
            cut += [most] * (length // most - 1) + [length % most] * (length % most > 0)
    return cut


def knowing_memory(found: Examined, meeting: Meeting) -> Examined:
    """Return the examination with the memory of the host that has the least, so that all hosts
    choose alike. It waits for the other hosts, and raises as `Meeting.least` does."""
    limit_seconds = found.recipe.launch.timeout_minutes * 60
    least = meeting.least("bytes of memory", host_memory(), limit_seconds)
    return found.knowing(memory_bytes=least)


def weighing(
    found: Examined, lengths: Sequence[int], *, source: str = "data", keeps: bool | None = None
) -> Examined:
    """Return the examination of a recipe with strategies, with their predicted time.

    lengths: tokens of samples. source: a phrase for these samples. keeps: whether the resumed
    checkpoint has several layouts in a step, so that `auto` must too. Raises Fault where `auto`
    finds no layout that fits, or where the recipe has another fault.
    """
    data, samples = found.recipe.data, found.loaded.recipe.training.global_batch_size
    drawn = DrawnSteps(lengths, samples, data.sequence_length, data.packing)
    setting = _setting(found)
    if found.loaded.recipe.parallel_config.strategies == AUTO:
        choice = choose(setting, drawn, keeps=keeps)
        if not choice.switches and choice.best_static is None:
            size = f"{setting.memory_bytes / (1 << 30):.3g} GiB"
            rows = f"{found.recipe.training.micro_batch_size} × {data.sequence_length} tokens"
            what = f"is {AUTO}, and by the planner no layout has room for {rows} in {size} a rank"
            remedy = "take shorter rows or more processes, or list the strategies"
            raise Fault([(KEY, what, remedy)])
    else:
        choice = beside_static(_listed(found, setting, drawn), drawn)
    weighed = found.knowing(weighed=Weighed(choice, drawn, source))
    findings = run_findings(weighed.recipe, weighed.layout, weighed.shape)
    if findings := findings + exchange_findings(weighed.recipe, weighed.layout):
        raise Fault(findings)
    return weighed


def _setting(found: Examined) -> Setting:
    """Return the fixed facts of the run. Raises Fault where the model's config is not here."""
    recipe, hardware = found.recipe, hardware_of(found)
    asked, zero = recipe.parallel_config.switching, recipe.deepspeed.zero_optimization
    memory = hardware.memory.bytes
    ours = set(zero) <= {"stage"} and recipe.memory.gradient_reduction == "float32"
    if recipe.launch.device == "cpu":
        memory = (found.known.memory_bytes or host_memory()) / hardware.ranks_per_host
    return Setting(
        step_of(found),
        hardware,
        found.layout.ranks,
        memory,
        rows_at_once=recipe.training.micro_batch_size,
        in_place=asked != "move",
        moves=asked != "in_place" and ours,
    )


def mix_seconds(found: Examined, place: Invocation) -> float | None:
    """Return the predicted seconds of a step under a recipe's strategies; None where the lengths of
    the data are not known here. Raises DataError."""
    with tokenizer_here(found.here) as tokenizer:
        corpus = corpus_here(found, place, tokenizer)
    if corpus is None:
        return None
    data, samples = found.recipe.data, found.recipe.training.global_batch_size
    drawn = DrawnSteps(lengths_of(found.here, corpus), samples, data.sequence_length, data.packing)
    return _listed(found, _setting(found), drawn).seconds(drawn)


def _listed(found: Examined, setting: Setting, drawn: DrawnSteps) -> LayoutSet:
    """Return the layouts that a recipe lists, with their costs."""
    buckets = _priced_each(found, setting, drawn.typical)
    moves = found.recipe.parallel_config.switching == "move"
    stored = min(one.layout.tensor for one in buckets)
    return LayoutSet(setting, buckets, stored, moves)


def _priced_each(
    found: Examined, setting: Setting, typical: Callable[[int], Segments]
) -> tuple[PricedLayout, ...]:
    """Return the layouts that a recipe lists, each priced for rows of its length. typical: returns
    a row of a length, with typical documents."""
    every = []
    for alone, layout in found.each_layout:
        step = replace(setting.step, options=options_of(alone, layout))
        here, length = replace(setting, step=step), alone.data.sequence_length
        every.append(priced(here, way_of(alone, layout), length, typical(length)))
    return tuple(every)


def has_strategies(found: Examined) -> bool:
    """Return whether several layouts are requested, as a list or by `auto`."""
    asked = found.loaded.recipe
    return bool(strategies_of(asked)) or asked.parallel_config.strategies == AUTO


ROWS = 64
"""How many rows are sampled."""
MOST_SAMPLES = 1 << 14
"""The most samples that are packed to fill rows from the first records."""


def sample_of(found: Examined, place: Invocation) -> DrawnRows | None:
    """Return rows of the data: those of a run if it is tokenised already, else rows packed from the
    first records; None without either. Nothing is written. Raises DataError."""
    recipe = found.here
    if found.shape is None:
        return None
    with tokenizer_here(recipe) as tokenizer:
        if corpus := corpus_here(found, place, tokenizer):
            stream = training_rows(recipe.data, corpus, recipe.seed)
            rows = _spread(range(stream.rows_in_epoch(0)))
            segments = tuple(stream.row(number).segments for number in rows)
            return DrawnRows(segments, "the data") if segments else None
        lengths = first_look(recipe.data, tokenizer, found.shape.vocab_size).lengths
    packed = _packed(recipe, documents_of(recipe, lengths))
    return DrawnRows(packed, "the first records") if packed else None


def _packed(recipe: Recipe, lengths: list[int]) -> tuple[Segments, ...]:
    """Return rows packed from samples of these lengths as the recipe says; the samples repeat if
    they are too few to fill rows."""
    data = recipe.data
    if lengths and data.packing == "best_fit":
        often = -(-ROWS * data.sequence_length // sum(lengths))
        lengths = lengths * min(often, -(-MOST_SAMPLES // len(lengths)))
    rows = rows_of_samples(dict(enumerate(lengths)), (data.sequence_length,), data.packing)
    chosen = (rows[number] for number in _spread(range(len(rows))))
    return tuple(
        segments_of([lengths[place] for place in row.samples], data.sequence_length)
        for row in chosen
    )


def _spread(numbers: range, most: int = ROWS) -> list[int]:
    """Return `most` numbers of a range, evenly spread, or all if it has fewer."""
    count = min(most, len(numbers))
    return [numbers[place * len(numbers) // count] for place in range(count)]
