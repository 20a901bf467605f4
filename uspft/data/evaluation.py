"""Evaluation sets: each source of `data.eval` is tokenised alone, to get a loss of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from uspft.data.cache import prepare
from uspft.data.faults import DataError

if TYPE_CHECKING:
    from uspft.config import Finding
    from uspft.config.recipe import DataBlock

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
