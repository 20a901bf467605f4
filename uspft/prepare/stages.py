"""The stages in which a recipe is resolved before ranks start; each adds what it finds out.

    examine       what is written, and what this machine shows (prepare/examine.py)
    with_model    the model's folder and sizes
    with_data     the tokenised data, its formats and first rows; the layouts that `auto` becomes
    job_of        what ranks are given

Each returns the examination with more facts (`Known`), by which every `auto` is settled again.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from uspft.data import formats_of
from uspft.job import Job
from uspft.prepare.data import first_rows, prepare_data, steps_of
from uspft.prepare.examine import Examined
from uspft.prepare.invocation import Invocation
from uspft.prepare.make_plan import chunk_prices_of, prices_of
from uspft.prepare.tokenizer import fetched
from uspft.prepare.weigh_strategies import knowing_memory, lengths_of, weighing


def with_model(found: Examined, place: Invocation) -> Examined:
    """Return the examination with the model on this host; a hub model is downloaded.

    Raises Fault as `Examined.knowing_model` does.
    """
    return found.knowing_model(fetched(found.recipe.model, place.cache))


def with_data(
    found: Examined, place: Invocation, screen: Console, *, keeps: bool | None = None
) -> Examined:
    """Return the examination with the data tokenised, and with the algorithm and layouts that
    `auto` becomes by it.

    keeps: as of `weighing`. Raises DataError, and Fault where no layout fits.
    """
    assert found.shape  # its config is here
    corpus, evaluation = prepare_data(found.here, found.shape, place, screen)
    rows, formats = first_rows(found.here, corpus), formats_of(found.recipe.data)
    found = found.knowing(corpus=corpus, evaluation=evaluation, rows=rows, formats=formats)
    if not found.is_open:
        return found
    found = knowing_memory(found, place.meeting)
    return weighing(found, lengths_of(found.here, corpus), keeps=keeps)


def job_of(found: Examined, place: Invocation, identity: dict[str, Any], **more: Any) -> Job:
    """Return what ranks are given of a recipe whose model and data are ready.

    identity, more: other fields of the job.
    """
    return Job(
        found.recipe,
        found.corpus,
        steps_of(found.recipe, found.corpus),
        identity,
        command=place.command,
        places=found.known.places,
        prices=prices_of(found),
        chunk_prices=chunk_prices_of(found),
        **more,
    )
