"""The command `preprocess`: it fills the cache as the start of a run would, but on all cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from uspft.config import Fault, load
from uspft.config.problems import counted
from uspft.data.corpus.corpus import CacheSize, corpora_in, empty, holding, read_report
from uspft.launcher.hosts import planned_hosts
from uspft.layout import as_processes
from uspft.metrics import as_size
from uspft.prepare.examine import examine
from uspft.prepare.files import find_paths
from uspft.prepare.host import Invocation
from uspft.prepare.make_job import prepare_data, with_model


def preprocess(
    target: Path, overrides: Sequence[str], place: Invocation, *, clean: bool = False
) -> int:
    """Fetch the model and tokenise the data for a run, and print where they are; no GPU is needed.

    clean: delete what the cache holds instead. Raises InputError.
    """
    screen = Console(highlight=False, soft_wrap=True)
    if clean:
        _empty(place.data_cache(find_paths(load(target, overrides)).recipe), screen)
        return 0
    found = examine(target, overrides, planned_hosts(place.environment), place.ranks, trains=False)
    with found.placed():
        found = with_model(found, place)
        cores = max(found.here.data.workers, len(os.sched_getaffinity(0)))
        recipe = found.here.changed(data={"workers": cores})
        cache = place.data_cache(recipe)
        before = corpora_in(cache)
        assert found.shape  # `knowing_model` would have refused it
        corpus, evaluation = prepare_data(recipe, found.shape, place, screen)
    made = [folder for folder in corpora_in(cache) if folder not in before]
    reports = [report for folder in made if (report := read_report(folder)).get("seconds")]
    seconds = sum(report["seconds"] for report in reports)
    tokens = sum(report["tokens"] for report in reports)
    lines = ["all of it was in the cache"]
    if seconds:
        rate = f"{tokens / seconds:,.0f} tokens/s, up to {as_processes(cores)}"
        lines = [f"tokenised in {seconds:,.1f} s ({rate})"]
    for folder in dict.fromkeys([corpus, *evaluation.values()]):
        lines.append(f"prepared: {folder} ({as_size(holding([folder]).bytes)})")
    whole = holding(corpora_in(cache))
    holds = f"holds {as_size(whole.bytes)} of {_sets(whole)}"
    empties = place.to_type("preprocess", str(target), *overrides, "--clean")
    lines.append(f"cache: {cache} {holds}; {empties} empties it")
    screen.print("\n".join(lines), markup=False)
    return 0


def _empty(cache: Path, screen: Console) -> None:
    """Empty the cache, and print how much was deleted. Raises Fault."""
    try:
        gone = empty(cache)
    except OSError as error:
        what = f"`{error.filename or cache}` cannot be deleted: {error.strerror}"
        raise Fault([("data.cache_dir", what, "delete it by hand, or name another")]) from error
    what = f"held {as_size(gone.bytes)} of {_sets(gone)}, now gone"
    screen.print(f"cache: {cache} {what}", markup=False)


def _sets(size: CacheSize) -> str:
    """Return a phrase for the number and bytes of data sets."""
    unfinished = f", {size.unfinished:,} of them unfinished" if size.unfinished else ""
    return f"{counted(size.corpora, 'data set')}{unfinished}"
