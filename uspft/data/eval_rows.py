"""The rows of evaluation sets, each packed as in training, with every row once in file order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.data.corpus import Corpus
from uspft.data.loader import StepLoader
from uspft.data.stream import RowStream

if TYPE_CHECKING:
    from uspft.job import Job
    from uspft.world import World


@dataclass(frozen=True)
class EvalSet:
    """One source of `data.eval`, packed into rows."""

    title: str
    loader: StepLoader
    """Its step i is forward pass i, in which each replica takes one micro-batch."""
    passes: int
    """The number of forward passes that take every row once."""


def evaluation_sets(job: Job, world: World) -> list[EvalSet]:
    """Return the evaluation sets of a job. world: the live layout that their rows are split by."""
    data, training = job.recipe.data, job.recipe.training
    each = training.eval_micro_batch_size or training.micro_batch_size
    at_once = each * world.layout.data
    found = []
    for title, folder in job.evaluation.items():
        stream = RowStream(
            Corpus.open(folder), data.sequence_length, data.packing, False, job.recipe.seed
        )
        rows = stream.rows_in(1)
        loader = StepLoader(
            stream,
            world,
            row_tokens=data.sequence_length,
            rows_per_step=at_once,
            rows_per_batch=each,
            last_row=rows,
        )
        found.append(EvalSet(title, loader, math.ceil(rows / at_once)))
    return found
