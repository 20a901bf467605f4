"""A recipe's first steps on these ranks, through the parts that train."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from uspft.assemble import Run, assemble
from uspft.comm import largest
from uspft.engine.zero import NotFinite
from uspft.schedule import learning_rate
from uspft.verify.faults import EVERYWHERE, FAULTS
from uspft.verify.gradients import See, gradients
from uspft.verify.result import Measured
from uspft.verify.weights import weights_under_way

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.job import Job


def measure(job: Job, device: torch.device, steps: int, fault: str | None, see: See) -> Measured:
    """Train for some steps; every gradient of the first goes to `see`; collective.

    fault: one of FAULTS, or None. Nothing is written, and all memory is given back.
    """
    run = assemble(job, device, weights_under_way)
    recipe, found = job.recipe, Measured()
    for step in range(1, steps + 1):
        batches = run.loader.batches(step)
        if step == 1:
            run.loader.require_same_rows(batches)
            run.loader.require_shares(batches)
        if fault:
            batches = _broken(run, batches, fault)
        rate = learning_rate(step, job.steps, recipe.optimizer.learning_rate, recipe.lr_schedule)
        try:
            result = run.engine.step(batches, rate, stop=False)
        except NotFinite as error:
            found.stopped = f"step {step}: {error}"
            break
        found.losses.append(result.loss)
        found.grad_norms.append(result.grad_norm)
        found.targets.append(result.targets)
        if step == 1:
            for name, gradient in gradients(run.engine, recipe, result.grad_norm):
                see(name, gradient)
    run.engine.close()
    run.world.mesh.close()
    del run
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _broken(run: Run, batches: list[Batch], fault: str) -> list[Batch]:
    """The micro-batches with a fault in them."""
    world = run.world
    targets = float(sum(batch.targets for batch in batches))
    here = [targets] == largest([targets], world.mesh.tokens, world.device)
    if not (here or fault in EVERYWHERE):
        return batches
    return [FAULTS[fault](batch, world, run.loader.documents(batch)) for batch in batches]
