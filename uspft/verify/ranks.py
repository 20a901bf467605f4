"""What a rank of `verify` runs: the reference on one process, or every layout one after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from uspft.assemble import Run, assemble
from uspft.comm import deadline
from uspft.data.rows.loader import in_chunks
from uspft.engine.step import NotFinite
from uspft.mesh import Groups
from uspft.training.learning_rate import learning_rate
from uspft.verify.gradients import Comparison, GradientFile, GradientWriter, See, show_gradients
from uspft.verify.inject import EVERYWHERE, FAULTS
from uspft.verify.plain import plain, weights_under_way
from uspft.verify.work import (
    GRADIENTS,
    LAYOUTS,
    PLAIN,
    PLAIN_GRADIENTS,
    REFERENCE,
    Difference,
    Measured,
    Result,
    VerifyJob,
)

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.job import Job


def run_reference(verify: VerifyJob, device: torch.device) -> None:
    """Run the recipe on this process alone, after plain transformers if requested.

    The losses and gradients of both are written to the folder of results; the differences listed
    with plain transformers are the reference's from it.
    """
    folder, (layout,) = verify.folder, verify.layouts
    truth = None
    if verify.with_plain:
        writer = GradientWriter(folder / PLAIN_GRADIENTS)
        truth = plain(verify.under(layout), device, writer.add)
        writer.close()
    writer = GradientWriter(folder / GRADIENTS)
    comparison = Comparison(GradientFile(folder / PLAIN_GRADIENTS)) if truth else None

    def see(name: str, gradient: Tensor) -> None:
        writer.add(name, gradient)
        if comparison:
            comparison.add(name, gradient)

    found = measure(verify.under(layout), device, Groups(), see, steps=verify.steps)
    writer.close()
    Result(found, {}).leave(folder / REFERENCE)
    if truth and comparison:
        Result(truth, comparison.groups()).leave(folder / PLAIN)


def run_layouts(
    verify: VerifyJob,
    device: torch.device,
    say: Callable[[str], None],
    ranks_of_host: int | None = None,
) -> None:
    """Run every layout in turn, with a new engine for each; rank 0 compares and writes the
    results."""
    launch = verify.job.recipe.launch
    limit = deadline(launch.timeout_minutes, first_step=True)  # every layout has a first step
    first, groups = dist.get_rank() == 0, Groups(limit, ranks_of_host)
    for number, layout in enumerate(verify.layouts, 1):
        started = time.perf_counter()
        comparison = Comparison(GradientFile(verify.folder / GRADIENTS)) if first else None
        see: See = comparison.add if comparison else lambda name, gradient: None
        job, steps, fault = verify.under(layout), verify.steps, verify.inject
        measured = measure(job, device, groups, see, steps=steps, fault=fault)
        found: dict[str, Difference] = comparison.groups() if comparison else {}
        if first:
            seconds = time.perf_counter() - started
            Result(measured, found, seconds).leave(verify.folder / LAYOUTS)
            say(f"{number} of {len(verify.layouts)} layouts done, {seconds:.0f} s")


def measure(
    job: Job,
    device: torch.device,
    groups: Groups,
    see: See,
    *,
    steps: int,
    fault: str | None = None,
) -> Measured:
    """Train for some steps, and return the results of each; collective.

    see: called on rank 0 with every gradient of the first step. groups: those of the process.
    fault: one of FAULTS, or None. Nothing is written, and all memory is freed.
    """
    run = assemble(job, device, groups, weights_under_way)
    recipe, found = job.recipe, Measured()
    for step in range(1, steps + 1):
        batches = run.loader.batches(step)
        if step == 1:
            run.loader.require_same_rows(batches)
            run.loader.require_shares(batches)
        if fault:
            batches = _broken(run, batches, fault)
        rate = learning_rate(step, job.steps, recipe.optimizer.learning_rate, recipe.lr_schedule)
        look = partial(show_gradients, run.engine, see) if step == 1 else None
        try:
            result = run.engine.step(batches, rate, False, look)
        except NotFinite as error:
            found.stopped = f"step {step}: {error}"
            break
        found.losses.append(result.loss)
        found.grad_norms.append(result.grad_norm)
        found.targets.append(next(iter(result.counts.values())))
    run.loader.close()
    run.engine.close()
    run.world.books.close()
    del run
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _broken(run: Run, batches: list[Batch], fault: str) -> list[Batch]:
    """Return the micro-batches with a fault injected, on the ranks that it applies to."""
    targets = float(sum(batch.targets for batch in batches))
    here = [targets] == run.engine.largest(targets)
    if not (here or fault in EVERYWHERE):
        return batches
    broken = (FAULTS[fault](one, one.world, run.loader.documents(one)) for one in batches)
    return [in_chunks(one) for one in broken]
