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
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from uspft.data.cache import prepare
from uspft.data.faults import DataError

if TYPE_CHECKING:
    from uspft.config import Finding
    from uspft.config.recipe import DataBlock


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


_TRAIN = re.compile(r"data\.train\b")  # \b leaves data.train_on out


def prepare_sets(
    data: DataBlock,
    tokenizer_path: str | None,
    vocab_size: int,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Path]:
    """Return the folder that holds each source of data.eval tokenised, by the source's title.

    Titles are in the recipe's order. The arguments are those of `prepare`. Raises DataError, which
    names the source.
    """
    sources, found = data.eval or (), {}
    for number, source in enumerate(sources):
        alone = data.model_copy(update={"train": (source,), "eval": None})
        try:
            folder = prepare(alone, tokenizer_path, vocab_size, cache_dir, progress)
        except DataError as error:
            raise of_set(error, number, len(sources)) from error
        found[source.title] = folder
    return found


def of_set(error: DataError, number: int, count: int) -> DataError:
    """Return an error about a block whose `train` is one of `count` evaluation sets, in the
    recipe's terms."""
    key = "data.eval" if count == 1 else f"data.eval[{number}]"
    return DataError(error.beside, [_named(finding, key) for finding in error.findings])


def _named(finding: Finding, key: str) -> Finding:
    """Return a finding about a block whose `train` is one evaluation set, in the recipe's terms.

    Where its key is in `data.train`, that part becomes `key`, the set's own; else the text of the
    finding says that the data was read for that set.
    """
    named, what, remedy = finding
    if _TRAIN.match(named):
        return _TRAIN.sub(key, named), what, remedy
    return named, f"{what} (read for {key})", remedy
