"""The command `verify`: it runs a recipe's first steps under every legal layout, and compares them
with one process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from uspft.called import keep_imports
from uspft.commands.rank import joined, ranks_of_host, require_shared, start_ranks
from uspft.config.problems import UsageError
from uspft.launcher.hosts import Hosts
from uspft.launcher.terminal import Waiting
from uspft.prepare.examine import examine
from uspft.prepare.host import Invocation
from uspft.prepare.make_verify_job import STEPS, clear_results, prepare_verify
from uspft.verify.inject import FAULTS
from uspft.verify.report import Report
from uspft.verify.work import GRADIENT_FILES, LAYOUTS, PLAIN, REFERENCE, REPORT, VerifyJob, results


def verify(
    target: Path,
    overrides: Sequence[str],
    place: Invocation,
    *,
    steps: int = STEPS,
    inject: str | None = None,
    every: bool = False,
) -> int:
    """Compare every layout with one process, print a table, and write OUTPUT/verify/verify.json.

    Returns 0 where every layout equals one process, or, with `inject`, where every layout shows the
    fault; else 1, or the exit code of ranks that failed. Raises InputError before any rank starts.

    steps: how many are compared. inject: a fault to inject, which every layout must show. every:
    whether to run layouts beyond MAX_LAYOUTS too.
    """
    if inject is not None and inject not in FAULTS:
        what = f"unknown fault `{inject}`"
        raise UsageError("--inject", what, f"write one of {', '.join(FAULTS)}")
    hosts = place.meeting.hosts
    place.meeting.says("examining the recipe")
    found = examine(target, overrides, hosts.count, None, trains=False)
    screen = Console(highlight=False, soft_wrap=True, quiet=hosts.index > 0)
    place.meeting.says("making model and data ready")
    with found.placed():
        work, layouts, facts = prepare_verify(found, place, screen, steps, inject, every)
        if hosts.index == 0:
            clear_results(work)
    here = len(work.layouts)
    many = f"{here} layouts" if here == len(layouts) else f"{here} of {len(layouts)} layouts"
    screen.print(f"one process, then {many} of {facts['ranks']} processes", markup=False)
    try:
        code = _run(work, hosts, place)
    finally:
        for name in work.folder.glob(GRADIENT_FILES) if hosts.index == 0 else ():
            name.unlink()
    if code or hosts.index:
        return code
    (reference,), plain = results(work.folder / REFERENCE), results(work.folder / PLAIN)
    one_process = (reference.measured, plain[0] if plain else None)
    given = iter(results(work.folder / LAYOUTS))
    found_out = [(one, next(given) if one.reason is None else None) for one in layouts]
    report = Report.of(facts, one_process, found_out, work.inject)
    path = work.folder / REPORT
    path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    screen.print(f"{report.text()}\nall numbers: {path}", markup=False)
    return 0 if report.ok else 1


def _run(work: VerifyJob, hosts: Hosts, place: Invocation) -> int:
    """Run the reference process on the first host, then the layouts on all hosts, and return an
    exit code."""
    if hosts.index == 0:
        place.meeting.says("running one process, which the layouts are compared with")
        code = _start(work.alone(), Hosts(), place, "one-process")
        if code:
            return code
        (reference,) = results(work.folder / REFERENCE)
        if not reference.measured.losses:
            what = f"one process already fails: {reference.measured.stopped}"
            print(f"{what}; nothing was compared", file=sys.stderr)
            return 1
    return _start(work, hosts, place, "logs")


def _start(work: VerifyJob, hosts: Hosts, place: Invocation, logs: str) -> int:
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        work.write(Path(folder))
        return start_ranks(
            [folder, "verify"],
            work.job.recipe,
            hosts,
            place,
            logs=work.folder / logs,
            on_stop="nothing is saved",
        )


def rank(folder: Path, environment: Mapping[str, str], waiting: Waiting) -> int:
    """Run one rank of the job that `verify` left in `folder`. Raises what the run raises."""
    work = VerifyJob.read(folder)
    with joined(work.job.recipe.launch, environment) as device:
        waiting.close()
        from uspft.verify.ranks import run_layouts, run_reference

        keep_imports()
        if work.is_reference:
            run_reference(work, device)
        else:
            require_shared(work.folder, environment)
            first = dist.get_rank() == 0
            say = partial(print, flush=True) if first else lambda line: None
            run_layouts(work, device, say, ranks_of_host(environment))
    return 0
