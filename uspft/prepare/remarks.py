"""Lines on a legal recipe that are printed before its ranks start: the run's length, what changes
after resuming, experts and pipeline stages, memory, and idle ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from uspft.checkpoint.folder import Checkpoint
from uspft.config import Recipe
from uspft.config.messages import as_written
from uspft.config.problems import counted
from uspft.config.recipe import MemoryBlock
from uspft.config.strategies import KEY, strategies_of
from uspft.data.rows.stream import training_rows
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import FAMILIES, ModelShape, attention_windows
from uspft.job import Job
from uspft.layout import Layout
from uspft.metrics import Journal
from uspft.pipeline.schedules import forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import fits, longest_row, memory_of
from uspft.planner.options import options_of, stage_of
from uspft.planner.rank import as_long, ranked
from uspft.planner.stages import cut_by_flops
from uspft.planner.ways import way_of
from uspft.prepare.known import Known, saving_most, step_shape
from uspft.segments import Segments
from uspft.sequence import chunk_multiple
from uspft.sequence.chunked import Cut
from uspft.training.learning_rate import learning_rate
from uspft.written import METRICS

NAMED = 3
"""How many other degrees of expert parallelism are named."""


def expert_side(
    recipe: Recipe, shape: ModelShape, layout: Layout, hardware: Hardware
) -> str | None:
    """Return a sentence on the experts per rank, and on how long a step takes with other degrees of
    expert parallelism, by the planner; None for a model without experts."""
    every, degree, copies = shape.experts, layout.experts, layout.copies
    if every == 1:
        return None
    step, way = step_shape(recipe, shape), way_of(recipe, layout)

    def seconds(experts: int) -> float:
        other = replace(way, layout=replace(layout, experts=experts))
        return ranked(step, other, hardware).seconds

    able = [d for d in range(1, copies + 1) if copies % d == every % d == 0 and d != degree]
    others = able[:NAMED] if step.options.zero_stage else []
    own = seconds(degree)
    said = f"{every // degree} of a layer's {every} on a rank, "
    said += f"{step.tokens(layout):,.0f} tokens in a forward"
    each = (f"expert_parallel {d} takes {as_long(seconds(d), own)}" for d in others)
    return "; ".join([said, *each])


def wasted(
    recipe: Recipe,
    layout: Layout,
    each_layout: Sequence[tuple[Recipe, Layout]],
    shape: ModelShape | None,
) -> Iterator[str]:
    """Yield a line `key: what; remedy` for each thing that leaves ranks idle.

    each_layout: the recipe and layout of each strategy, or the only ones, as in `Examined`.
    """
    # In a pipeline ZeRO-3 does not prefetch weights: DeepSpeed predicts the next module from a
    # fixed order, but ranks run their stages in varying order.
    if layout.pipeline > 1 and stage_of(recipe) == 3:
        yield (
            "deepspeed.zero_optimization.stage: is 3, with parallel_config.pipeline_stage "
            f"{layout.pipeline}: weights are not fetched ahead there, so each layer waits for its "
            "own; write 1 or 2 where a stage's weights fit"
        )
    for number, (alone, own) in enumerate(each_layout):
        at = f"{KEY}[{number}]" if strategies_of(recipe) else "parallel_config"
        yield from _heads(alone, own, shape, at)
    # otherwise samples are assigned by predicted time
    if recipe.parallel_config.strategies is None:
        yield from _rows(recipe, layout)


def _heads(recipe: Recipe, layout: Layout, shape: ModelShape | None, at: str) -> Iterator[str]:
    """Yield a line if Ulysses has more ranks than query heads, so that some ranks have none."""
    heads = shape.heads // layout.mesh_columns if shape else layout.ulysses
    if layout.ulysses > heads:
        named = recipe.parallel_config.ulysses_degree_in_cp is not None
        key = f"{at}.{'ulysses_degree_in_cp' if named else 'context_parallel'}"
        of = f"{heads} query heads" + (" of a tensor rank" if layout.mesh_columns > 1 else "")
        yield (
            f"{key}: Ulysses splits {of} over {layout.ulysses} ranks: {layout.ulysses - heads} of "
            f"them compute no attention; split heads {heads} ways at most, and tokens the rest"
        )


def _rows(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield a line if a step has fewer rows than its micro-batches, so that replicas compute
    padding."""
    rows, micro = recipe.training.global_batch_size, recipe.training.micro_batch_size
    passes, at_once = micro_batches(recipe, layout), micro * layout.data
    if empty := passes * at_once - rows:
        turns = f"{passes} passes" if passes > 1 else "one pass"
        of = f"{layout.data} rows"
        less = ["use fewer processes"] * (layout.data > 1)
        if micro > 1:
            of = f"{counted(layout.data, 'replica')}, {micro} rows each"
            less.insert(0, "a smaller training.micro_batch_size")
        few = f"{rows} rows a step leave" if rows > 1 else "a row a step leaves"
        yield (
            f"training.global_batch_size: {few} {empty} of {passes * at_once} places empty "
            f"({turns} of {of}), which compute padding; "
            f"write a multiple of {at_once}, or {', or '.join(less)}"
        )


def too_short(recipe: Recipe, steps: int, rows: int | None = None) -> Iterator[str]:
    """Yield a line `key: what; remedy` for each way in which a run has too few steps.

    steps: of the whole run. rows: of an epoch (samples with strategies); None if the data is not
    read yet.
    """
    training, warm_up = recipe.training, recipe.lr_schedule.warmup_steps
    if training.epochs and rows and rows < training.global_batch_size:
        epochs, many = _epochs(training.epochs), counted(steps, "step")
        are = "is" if training.epochs == 1 else "are"
        counts = "samples" if strategies_of(recipe) else "rows"
        yield (
            f"training.global_batch_size: is {training.global_batch_size:,} {counts}, and an epoch "
            f"has {rows:,}, so that {epochs} {are} {many}; write at most {rows:,} for a step an "
            "epoch"
        )
    if warm_up and warm_up >= steps:
        yield (
            f"lr_schedule.warmup_steps: is {warm_up:,}, and the run has {counted(steps, 'step')}, "
            "so that the learning rate rises to its end; write fewer, or warmup_ratio"
        )


def _epochs(number: float) -> str:
    text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{text} epoch{'s' * (number != 1)}"


def intervals_told(recipe: Recipe, job: Job | None) -> Iterator[str]:
    """Yield a line on when checkpoints are saved, unless the recipe has the number of steps, and
    one on when evaluations run.

    job: None where the steps are not known yet, because the recipe counts epochs of data that is
    not read.
    """
    training, checkpoint = recipe.training, recipe.checkpoint
    sets = [source.title for source in recipe.data.eval or ()]
    if recipe.data.eval_fraction:
        sets = [f"{recipe.data.eval_fraction:.2%} of data.train, held out"]
    if checkpoint.every_epochs or (checkpoint.every_steps or 1) < 1:
        every = checkpoint.every_steps, checkpoint.every_epochs
        kept = f"the newest {checkpoint.keep_last} are" if checkpoint.keep_last else "all are"
        kept = "the newest is" if checkpoint.keep_last == 1 else kept
        yield f"checkpoints: {_often(*every, job.saved_steps if job else ())}; {kept} kept"
    if sets:
        every = training.eval_every_steps, training.eval_every_epochs
        often = _often(*every, job.evaluated_steps if job else ())
        yield f"evaluation: {', '.join(sets)}, {often}"


def _often(steps: float | None, epochs: float | None, ends: Sequence[int]) -> str:
    """Return a phrase for intervals of so many steps, of a share of all steps, or of epochs. ends:
    the steps that end them, if they are known."""
    if steps is None and epochs is None:
        return "at the end"
    if steps and steps >= 1:
        return f"after every {counted(int(steps), 'step').removeprefix('1 ')} and at the end"
    if epochs:
        every = f"every {_epochs(epochs).removeprefix('1 ')}"
    else:
        every = f"each {steps:.3g} of all steps"
    named = [f"{step:,}" for step in (*ends[:3], *ends[3:][-1:])]
    named[3:3] = ["…"] * (len(ends) > 4)
    which = f" (step{'s' * (len(named) > 1)} {', '.join(named)})" if named else ""
    return f"after {every}{which} and at the end"


def length_of_run(recipe: Recipe, corpus: Path, steps: int) -> list[str]:
    """Return a warning for each way in which the steps are too few, and a line on an epoch's rows
    and padding and on the epochs that the steps take."""
    switches = bool(strategies_of(recipe))
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    rows, each = stream.rows_in_epoch(0), recipe.training.global_batch_size
    counts = "samples" if switches else "rows"
    # later epochs may have another number of rows
    epochs = recipe.training.epochs or steps * each / rows
    of_epoch = f"{rows:,} {counts} an epoch"
    if not switches:
        many = "rows" if rows > 1 else "row"
        of_epoch = f"{rows:,} {many} of {recipe.data.sequence_length:,} tokens an epoch"
        of_epoch += f", {stream.padding():.1%} of them padding"
    of_step = f"{each:,} {counts}" if each > 1 else counts.removesuffix("s")
    stop = recipe.training.stop_step
    ends = f"; it ends after step {stop:,}, as training.stop_step says" if stop else ""
    told = f"{counted(steps, 'step')} of {'a ' * (each == 1)}{of_step}, {_epochs(epochs)}{ends}"
    few = [f"warning: {line}" for line in too_short(recipe, steps, rows)]
    return [*few, f"run: {of_epoch}; {told}"]


def changes_on_resuming(
    recipe: Recipe, checkpoint: Checkpoint, corpus: Path, steps: int
) -> Iterator[str]:
    """Yield a line if the learning rate changes on resuming, and a warning if rows are skipped.

    The schedule spans all steps of a run, so that another number of steps changes the rate at each.
    A run by epochs may end with a step of fewer rows; a longer one resumes after a whole step's.
    The previous rates and epochs are in the metrics of the run that wrote the checkpoint.
    """
    last: dict[str, Any] = {}
    with suppress(OSError):
        for record in Journal(checkpoint.folder.parent.parent / METRICS).records():
            if "learning_rate" in record and record["step"] <= checkpoint.step:
                last = record
    if not last:
        return
    step, was, after = last["step"], last["learning_rate"], checkpoint.step + 1
    rate = recipe.optimizer.learning_rate, recipe.lr_schedule
    if not math.isclose(was, learning_rate(step, steps, *rate), rel_tol=1e-6, abs_tol=1e-15):
        yield (
            f"learning rate: {was:.2e} at step {step}, {learning_rate(after, steps, *rate):.2e} "
            f"from step {after} on: lr_schedule now runs over {steps:,} steps from the first one"
        )
    if step < checkpoint.step or "epoch" not in last:
        return
    switches, each = bool(strategies_of(recipe)), recipe.training.global_batch_size
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    taken = last["epoch"] + 1e-9
    skipped = sum(stream.epochs_after(n) > taken for n in range((step - 1) * each, step * each))
    if skipped:
        rows = "samples" if switches else "rows"
        yield (
            f"warning: step {step:,} was the last of its run, with {each - skipped:,} of {each:,} "
            f"{rows}; the {skipped:,} that follow are not trained on, since step {after:,} starts "
            f"behind a whole step; checkpoint.resume=never takes all {rows}"
        )


def memory_sentence(
    recipe: Recipe, shape: ModelShape, layout: Layout, hardware: Hardware, asked: MemoryBlock
) -> str:
    """Return a sentence on a rank's memory and the card's.

    asked: the recipe's memory block with its `auto` values, which may be resolved differently for
    the longest row.
    """
    options = options_of(recipe, layout)
    predicted = memory_of(shape, layout, recipe.data.sequence_length, options=options)
    parts = (
        f"activations {_gib(predicted.activation_bytes)}, "
        f"weights, gradients and optimizer {_gib(predicted.state_bytes)}"
    )
    if predicted.host_bytes:
        parts += f"; on the host {_gib(predicted.host_bytes)}"
    if FAMILIES[shape.model_type].states and hardware.device:
        parts += "; states with fla's kernels, without which they take more"
    if not hardware.device:
        return f"about {_gib(predicted.peak_bytes)} GiB a rank ({parts})"
    card = hardware.memory.bytes
    lacking = "" if fits(predicted, card) else ", which is too much"
    said = [f"about {_gib(predicted.peak_bytes)} of {_gib(card)} GiB a rank{lacking} ({parts})"]
    options = saving_most(asked, shape, layout, options)
    longest = longest_row(shape, layout, card, options=options)
    said.append(f"the longest row that fits is {_tokens(longest)}")
    if options.checkpointing and not options.offload_activations and options.schedule.chunks == 1:
        away = replace(options, offload_activations=True)
        more = longest_row(shape, layout, card, options=away)
        if more != longest:
            said.append(f"with offload_activations: cpu {_tokens(more)}")
    return "; ".join(said)


def _gib(byte_count: float) -> str:
    return f"{byte_count / (1 << 30):.3g}"


def _tokens(count: int) -> str:
    """Return a number of tokens with a recipe's suffix."""
    if count >= 1 << 20:
        return f"{count / (1 << 20):.3g}m"
    return f"{count >> 10}k" if count else "none"


def says_layers(asked: Recipe) -> bool:
    """Return whether a user's recipe sets the layers of each stage."""
    parallel = asked.parallel_config
    return (parallel.layers_per_stage, parallel.offset) != (None, None)


def stages_sentence(recipe: Recipe, layout: Layout, asked: Recipe, known: Known) -> str | None:
    """Return a sentence on the layers of a resolved recipe's stages and the pipeline's bubble; None
    without a pipeline, or if the model's layers are not known. asked: the recipe as the user wrote
    it."""
    parallel = recipe.parallel_config
    if layout.pipeline == 1 or parallel.layers_per_stage is None or strategies_of(recipe):
        return None
    order, virtual = parallel.pipeline_scheduler, parallel.pp_interleave_num
    assert order and order != "auto"  # the recipe is resolved
    passes, chunks = micro_batches(recipe, layout), parallel.seq_split_num
    lists = forward_and_backward(order, layout.pipeline, passes, virtual, chunks)
    waits = simulate(lists, lambda action: 2.0 if action.kind == "backward" else 1.0).bubble
    named = f"interleaved {order}" if virtual > 1 and order != "gpipe" else order
    if order == "seqpipe" and chunks == 1:
        named += " of 1 chunk (seq_split_num), which is 1f1b,"
    many = counted(passes, "micro-batch", "es")
    if chunks > 1:
        many += f" in {chunks} chunks of equal {parallel.sequence_chunks}"
        many += _unequal(recipe, layout, known.shape)
        many += _brought(recipe, layout, known.shape)
    later = ""
    if recipe.data.packing != "none" and not (known.rows or says_layers(asked)):
        later = "; layers are dealt out for rows of one document, which the data may change"
    return (
        f"{as_written(parallel.layers_per_stage)} layers, {named} over {many}: ranks wait "
        f"{waits:.0%} of a step where stages take equal time{later}"
    )


UNEQUAL = 1.1
"""The largest ratio of a chunk's time to the mean that is not reported."""


def _unequal(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> str:
    """Return a phrase on how unequal chunks of equal time become by rounding to a multiple, if they
    do."""
    if not shape or recipe.parallel_config.sequence_chunks != "time":
        return ""
    cut = _cut(recipe, layout, shape)
    costs = cut.costs(Segments.single(recipe.data.sequence_length))
    if (most := costs.max() / costs.mean()) <= UNEQUAL:
        return ""
    return f" (one takes {most:.2f} of the mean, since all have multiples of {cut.multiple} tokens)"


def _cut(recipe: Recipe, layout: Layout, shape: ModelShape) -> Cut:
    """Return the cut of rows by FLOPs, an estimate of the run's cut by predicted seconds."""
    parallel = recipe.parallel_config
    multiple = chunk_multiple(layout, parallel.use_seq_parallel)
    cut = cut_by_flops(shape, parallel.seq_split_num, multiple)
    return cut.of_tokens if parallel.sequence_chunks == "tokens" else cut


def _brought(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> str:
    """Return a phrase on how often ring ranks send a row's keys: for each chunk all keys up to its
    end."""
    if layout.ring == 1 or not shape:
        return ""
    row = Segments.single(recipe.data.sequence_length)
    cut, windows = _cut(recipe, layout, shape), [*attention_windows(shape).elements()]
    times = sum(cut.brought(row, window) for window in windows) / max(1, len(windows))
    algorithm = recipe.parallel_config.context_parallel_algo
    return f" ({algorithm} sends keys {times:.2f} times as often as for whole rows of one document)"
