"""MindSpore Transformers' configuration as a recipe.

The global batch is counted by their formulas before anything is translated, and again after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uspft.convert.conversion import Conversion
from uspft.convert.mindspore_checks import their_errors
from uspft.convert.mindspore_course import course, outputs
from uspft.convert.mindspore_data import data
from uspft.convert.mindspore_layout import TheirDegrees, degrees_of, layout, micro_batch
from uspft.convert.mindspore_memory import memory, sharding
from uspft.convert.mindspore_model import model
from uspft.convert.outcome import Outcome
from uspft.convert.theirs import Theirs


def convert_mindspore(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes, and what became of each key.

    given: keys of ours that the command line writes. ranks: how many processes there are; None: as
    many as the product of their degrees.
    """
    run = Conversion(theirs, given)
    degrees = degrees_of(run)
    their_errors(run, degrees)
    batch = _global_batch(run, degrees)
    replicas = layout(run, degrees, batch, ranks)
    model(run)
    micro = micro_batch(run, batch, replicas)
    sharding(run, degrees, batch // (replicas * micro))
    _batch(run, batch, micro)
    course(run, batch)
    memory(run, degrees.stages)
    data(run)
    outputs(run)
    return run.ended(batch)


def _global_batch(run: Conversion, degrees: TheirDegrees) -> int:
    """Return the rows of one update, by their formulas."""
    micro = run.whole("runner_config.batch_size")
    copies = run.whole("micro_batch_interleave_num")
    if degrees.stages > 1:
        return micro * degrees.data * run.whole("parallel_config.micro_batch_num") * copies
    return micro * degrees.data * copies * run.whole("runner_config.gradient_accumulation_steps")


def _batch(run: Conversion, batch: int, micro: int) -> None:
    size, copies = "runner_config.batch_size", "micro_batch_interleave_num"
    say = "as the batch divides over these ranks" if micro != run.whole(size) else ""
    run.put("training.micro_batch_size", micro, size, say=say)
    run.put("training.global_batch_size", batch)
    for key in (copies, "runner_config.gradient_accumulation_steps"):
        if run.written(key):
            run.changed(key, f"here `training.global_batch_size: {batch}`")
    said = "by batch_size, data_parallel and the number of micro-batches"
    run.outcome.comments["training.global_batch_size"] = said
    name = "calculate_per_token_loss"
    tokens = (f"runner_wrapper.{name}", f"model.model_config.{name}")
    if not any(run.flag(key) for key in tokens if run.written(key)):
        what = "is off there, the mean over micro-batches; here the loss is per target token"
        run.changed(run.written(*tokens) or tokens[0], f"{what} of the whole batch")
