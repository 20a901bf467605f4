"""The predicted time of `strategies` for the lengths of the data: by it `auto` chooses, and `plan`
prints it of layouts that are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from uspft.config import Fault, Recipe
from uspft.config.algorithms import AUTO, row_of
from uspft.config.strategies import KEY, strategies_of
from uspft.data import first_look, prepared, training_rows
from uspft.launcher.hosts import host_memory
from uspft.launcher.meeting import Meeting
from uspft.planner.options import options_of
from uspft.planner.stages import schedule_of
from uspft.planner.step_shape import DrawnRows
from uspft.prepare.data import cache_of
from uspft.prepare.examine import Examined
from uspft.prepare.host import Invocation
from uspft.prepare.known import Weighed, matrices_of
from uspft.prepare.layout_findings import run_findings
from uspft.prepare.make_plan import hardware_of, step_of
from uspft.prepare.memory import exchange_findings
from uspft.prepare.model import tokenizer_here, tokenizer_of
from uspft.segments import Segments
from uspft.sequence import of_recipe
from uspft.switching.choose.choice import beside_static, choose
from uspft.switching.choose.drawn_steps import DrawnSteps, segments_of
from uspft.switching.choose.layout_set import LayoutSet
from uspft.switching.choose.priced import Setting, priced
from uspft.switching.deal.micro_steps import rows_of_samples

LOOKED_AT = 16_384
"""The most samples whose lengths are looked at, evenly spaced over an epoch."""


def lengths_of(recipe: Recipe, corpus: Path) -> list[int]:
    """Return the lengths in tokens of the samples that a recipe trains on, or of LOOKED_AT of them.

    A sample that `overlong: split` cuts counts as its documents, and sources count by their weight.
    """
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=True)
    count = stream.rows_in_epoch(0)
    looked_at = min(count, LOOKED_AT)
    return [stream.tokens_of(number * count // looked_at) for number in range(looked_at)]


def corpus_here(found: Examined, place: Invocation, tokenizer: str | None) -> Path | None:
    """Return the folder of a recipe's data, read or as a command has tokenised it before; None
    where none has, or where that cannot be told without a network. Nothing is written.

    tokenizer: its folder, as of `tokenizer_here`. Raises DataError.
    """
    recipe = found.here
    if found.known.corpus:
        return found.known.corpus
    if found.shape is None or (tokenizer is None and tokenizer_of(recipe.model)):
        return None
    return prepared(recipe.data, tokenizer, found.shape.vocab_size, cache_of(recipe, place))


def weighed_here(
    found: Examined, place: Invocation, tokenizer: str | None, looked_at: Sequence[int]
) -> Examined:
    """Return the examination of a recipe with strategies with their predicted time added, by the
    lengths that are known before a run; unchanged where none are.

    tokenizer: its folder, as of `tokenizer_here`. looked_at: tokens of the first records, for data
    that was not tokenised before. Raises as `weighing` does, and DataError.
    """
    if corpus := corpus_here(found, place, tokenizer):
        return weighing(found, lengths_of(found.here, corpus))
    lengths, source = documents_of(found.recipe, looked_at), "first records"
    return weighing(found, lengths, source=source) if lengths else found


def documents_of(recipe: Recipe, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the documents that samples become under `data.overlong`."""
    most, how = recipe.data.sequence_length, recipe.data.overlong
    cut = [min(length, most) for length in lengths if how != "drop" or length <= most]
    if how == "split":
        for length in lengths:
            cut += [most] * (length // most - 1) if length > most else []
            cut += [length % most] if length > most and length % most else []
    return cut


def knowing_memory(found: Examined, meeting: Meeting) -> Examined:
    """Return the examination with the memory of the host that has least, of those of the run: then
    all choose alike. It waits for the other hosts, and raises as `Meeting.least` does."""
    limit_seconds = found.recipe.launch.timeout_minutes * 60
    least = meeting.least("bytes of memory", host_memory(), limit_seconds)
    return found.knowing(memory_bytes=least)


def weighing(
    found: Examined, lengths: Sequence[int], *, source: str = "data", keeps: bool | None = None
) -> Examined:
    """Return the examination of a recipe with strategies, with their predicted time added.

    lengths: tokens of samples. source: of which, for a person. keeps: whether the checkpoint that
    the run goes on from has several layouts in a step, to which `auto` keeps. Raises Fault where
    `auto` finds no layout that fits, or where something else in the recipe speaks against it.
    """
    data, samples = found.recipe.data, found.loaded.recipe.training.global_batch_size
    drawn = DrawnSteps(lengths, samples, data.sequence_length, data.packing)
    setting = _setting(found)
    if found.loaded.recipe.parallel_config.strategies == AUTO:
        choice = choose(setting, drawn, keeps=keeps)
        if not choice.switches and choice.best_static is None:
            raise Fault([_too_much(found.recipe, setting)])
    else:
        choice = beside_static(_listed(found, setting, drawn), drawn)
    weighed = found.knowing(weighed=Weighed(choice, drawn, source))
    findings = run_findings(weighed.recipe, weighed.layout, weighed.shape)
    if findings := findings + exchange_findings(weighed.recipe, weighed.layout):
        raise Fault(findings)
    return weighed


def _too_much(recipe: Recipe, setting: Setting) -> tuple[str, str, str]:
    size = f"{setting.memory_bytes / (1 << 30):.3g} GiB"
    rows = f"{recipe.training.micro_batch_size} × {recipe.data.sequence_length} tokens"
    what = f"is {AUTO}, and by the planner no layout has room for {rows} in {size} a rank"
    return KEY, what, "take shorter rows or more processes, or list the strategies"


def _setting(found: Examined) -> Setting:
    """Return what the run is given. Raises Fault where the model's config is not here."""
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
        options_of(recipe, found.layout),
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
    lengths = lengths_of(found.here, corpus)
    data, samples = found.recipe.data, found.recipe.training.global_batch_size
    drawn = DrawnSteps(lengths, samples, data.sequence_length, data.packing)
    return _listed(found, _setting(found), drawn).seconds(drawn)


def _listed(found: Examined, setting: Setting, drawn: DrawnSteps) -> LayoutSet:
    """Return the layouts that a recipe lists."""
    buckets = []
    for alone, layout in found.each_layout:
        parallel, length = alone.parallel_config, alone.data.sequence_length
        shape = replace(setting.step, **matrices_of(parallel))
        options = replace(setting.options, schedule=schedule_of(parallel))
        row = row_of(parallel.context_parallel_algo, layout.context)
        way = row, layout, of_recipe(alone, layout)
        here = replace(setting, step=shape, options=options)
        buckets.append(priced(here, way, length, drawn.typical(length)))
    moves = found.recipe.parallel_config.switching == "move"
    stored = min(one.layout.tensor for one in buckets)
    return LayoutSet(setting, tuple(buckets), stored, moves)


def has_strategies(found: Examined) -> bool:
    """Return whether several layouts are asked for, as a list or by `auto`."""
    asked = found.loaded.recipe
    return bool(strategies_of(asked)) or asked.parallel_config.strategies == AUTO


ROWS = 64
"""Rows that are looked at."""
MOST_SAMPLES = 1 << 14
"""Samples that are packed, where the first records are to fill rows."""


def sample_of(found: Examined, place: Invocation) -> DrawnRows | None:
    """Return rows of the data: those of a run where a command has tokenised it before, else rows
    packed of the first records; None where neither is here. Nothing is written. Raises DataError.
    """
    recipe = found.here
    if found.shape is None:
        return None
    with tokenizer_here(recipe) as tokenizer:
        if corpus := corpus_here(found, place, tokenizer):
            return _rows_of(recipe, corpus)
        lengths = first_look(recipe.data, tokenizer, found.shape.vocab_size).lengths
    packed = _packed(recipe, documents_of(recipe, lengths))
    return DrawnRows(packed, "the first records") if packed else None


def _rows_of(recipe: Recipe, corpus: Path) -> DrawnRows | None:
    stream = training_rows(recipe.data, corpus, recipe.seed)
    rows = _spread(range(stream.rows_in_epoch(0)))
    segments = tuple(stream.row(number).segments for number in rows)
    return DrawnRows(segments, "the data") if segments else None


def _packed(recipe: Recipe, lengths: list[int]) -> tuple[Segments, ...]:
    """Return rows of samples of these lengths, packed as the recipe says; few samples come often
    enough to fill rows."""
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


def _spread(numbers: range) -> list[int]:
    """Return ROWS of so many numbers, or all, evenly spread."""
    count = min(ROWS, len(numbers))
    return [numbers[place * len(numbers) // count] for place in range(count)]
