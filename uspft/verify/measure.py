"""A recipe's first steps on these ranks, run by the code that trains."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

import torch

from uspft.assemble import Run, assemble
from uspft.comm import largest
from uspft.data.loader import in_chunks
from uspft.engine.step import NotFinite
from uspft.training.learning_rate import learning_rate
from uspft.verify.gradients import See, show_gradients
from uspft.verify.inject import EVERYWHERE, FAULTS
from uspft.verify.result import Measured
from uspft.verify.under_way import weights_under_way

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.job import Job
    from uspft.mesh import Groups


def measure(
    job: Job,
    device: torch.device,
    groups: Groups,
    see: See,
    *,
    steps: int,
    fault: str | None = None,
) -> Measured:
    """Train for some steps, and return what each gave; collective.

    see: called on the first rank with every gradient of the first step. groups: those of the
    process. fault: one of FAULTS, or None. Nothing is written, and all memory is given back.
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
    """Return the micro-batches with a fault in them, on the ranks that it is meant for."""
    targets = float(sum(batch.targets for batch in batches))
    here = [targets] == largest([targets], run.engine.holders.everyone, run.engine.device)
    if not (here or fault in EVERYWHERE):
        return batches
    broken = (FAULTS[fault](one, one.world, run.loader.documents(one)) for one in batches)
    return [in_chunks(one) for one in broken]
