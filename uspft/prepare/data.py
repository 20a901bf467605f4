"""The data of a run, made ready before ranks start."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from uspft.config import Recipe
from uspft.config.problems import counted
from uspft.config.strategies import strategies_of
from uspft.data import (
    HELD_OUT,
    Corpus,
    DataError,
    hold_out,
    prepare,
    prepare_sets,
    read_report,
    training_rows,
)
from uspft.data.faults import SHOWN_LINES
from uspft.families import ModelShape
from uspft.launcher.terminal import TOLD_SECONDS, Waiting
from uspft.prepare.host import Invocation
from uspft.prepare.model import tokenizer_of
from uspft.segments import Segments

PIECE = 1 << 24
"""Tokens that are looked at together."""
FIRST_ROWS = 4
"""How many of the first rows `auto` looks at before it picks one split for the run."""


def prepare_data(
    recipe: Recipe, shape: ModelShape, place: Invocation, screen: Console
) -> tuple[Path, dict[str, Path]]:
    """Tokenise the training data and each evaluation set, where that has not been done before.

    Where there is no evaluation set, data.eval_fraction holds one out of the training data. Returns
    the folder of the training data, and those of the evaluation sets by title. Raises DataError
    where a sample holds a token that stands for an image.
    """
    vocabulary, cache, hidden = shape.vocab_size, cache_of(recipe, place), not screen.is_terminal
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=hidden) as progress:
        task = progress.add_task("reading data", total=None)
        waiting = Waiting(screen)
        started = told = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal told
            waiting.over()
            progress.update(task, description="tokenising", completed=done, total=total)
            now = time.monotonic()
            if hidden and now - told >= TOLD_SECONDS:
                told = now
                screen.print(f"tokenising: {done / (total or 1):.0%} after {now - started:.0f} s")

        tokenizer = tokenizer_of(recipe.model)
        with waiting.on("the data"):
            corpus = prepare(recipe.data, tokenizer, vocabulary, cache, tick)
        progress.reset(task, description="reading evaluation data", total=None)
        with waiting.on("the evaluation data"):
            evaluation = prepare_sets(recipe.data, tokenizer, vocabulary, cache, tick)
    whole = corpus
    for folder in (corpus, *evaluation.values()):
        require_text(Corpus.open(folder), shape)
    if recipe.data.eval_fraction:
        corpus, held = hold_out(corpus, recipe)
        evaluation = {HELD_OUT: held}
    _tell("data", whole, screen, mix_of=corpus)
    for title, folder in evaluation.items():
        _tell(f"evaluation data {title}", folder, screen)
    return corpus, evaluation


def require_text(corpus: Corpus, shape: ModelShape) -> None:
    """Check that no sample has a token that stands for an image: of a multimodal model the language
    model alone is trained. Raises DataError, which names the samples."""
    lines = dict[str, None]()
    for key, token in shape.media.items():
        for start in range(0, len(corpus.tokens), PIECE):
            places = start + np.flatnonzero(corpus.tokens[start : start + PIECE] == token)
            for sample in np.unique(np.searchsorted(corpus.offsets, places, "right") - 1):
                what = f"holds the token {token}, {key} of {shape.whole_type}, and text alone is"
                remedy = "trained: leave the record out, or name a model without images"
                lines[f"{corpus.origin(int(sample))}: {what} {remedy}"] = None
            if len(lines) >= SHOWN_LINES:
                break
    if lines:
        raise DataError([*lines][:SHOWN_LINES])


def cache_of(recipe: Recipe, place: Invocation) -> Path:
    """Return the folder in which tokenised data is kept."""
    return Path(recipe.data.cache_dir or place.cache / "data")


def _tell(what: str, folder: Path, screen: Console, mix_of: Path | None = None) -> None:
    """Print how much data there is, and how many samples were dropped, cut or have no targets.

    mix_of: where the data lies whose mix is told, which may be a part of it.
    """
    report = read_report(folder)
    samples, longest = counted(report["samples"], "sample"), report["longest"]
    lines = [*report.get("shapes", ()), *report.get("unused", ())]
    lines += [f"{samples}, {report['tokens']:,} tokens, longest {longest:,}", *report["notes"]]
    lines += [*report.get("skipped", ()), *report.get("untrained", ())]
    for line in (*lines, *(read_report(mix_of).get("mix", ()) if mix_of else ())):
        screen.print(f"{what}: {line}", markup=False)


def steps_of(recipe: Recipe, corpus: Path) -> int:
    """Return how many steps the whole run has."""
    training = recipe.training
    if training.steps:
        return training.steps
    switches = bool(strategies_of(recipe))
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    return stream.steps_in_epochs(training.epochs or 1, training.global_batch_size)


def first_rows(recipe: Recipe, corpus: Path) -> list[Segments]:
    """Return the documents of each of the run's first FIRST_ROWS rows."""
    stream = training_rows(recipe.data, corpus, recipe.seed)
    return [stream.row(index).segments for index in range(FIRST_ROWS)]
