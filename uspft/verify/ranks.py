"""What a rank of `verify` does: the reference on one process, or every layout one after another."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from uspft.comm import deadline
from uspft.mesh import Groups
from uspft.verify.gradients import Comparison, GradientFile, GradientWriter
from uspft.verify.measure import measure
from uspft.verify.plain import plain
from uspft.verify.result import Difference, Result
from uspft.verify.work import GRADIENTS, LAYOUTS, PLAIN, PLAIN_GRADIENTS, REFERENCE, VerifyJob


def run_reference(verify: VerifyJob, device: torch.device) -> None:
    """Run the recipe on this one process, and where asked plain transformers before it.

    The losses and gradients of both are left in the folder of results; the differences that stand
    with plain transformers' result are those of the reference from it.
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
    """Run every layout in turn, with engines built anew; the first rank compares and leaves the
    results."""
    launch = verify.job.recipe.launch
    limit = deadline(launch.timeout_minutes, first_step=True)  # each layout has first steps
    first, groups = dist.get_rank() == 0, Groups(limit, ranks_of_host)
    for number, layout in enumerate(verify.layouts, 1):
        started = time.perf_counter()
        comparison = Comparison(GradientFile(verify.folder / GRADIENTS)) if first else None
        see = comparison.add if comparison else _ignore
        job, steps, fault = verify.under(layout), verify.steps, verify.inject
        measured = measure(job, device, groups, see, steps=steps, fault=fault)
        found: dict[str, Difference] = comparison.groups() if comparison else {}
        if first:
            seconds = time.perf_counter() - started
            Result(measured, found, seconds).leave(verify.folder / LAYOUTS)
            say(f"{number} of {len(verify.layouts)} layouts done, {seconds:.0f} s")


def _ignore(name: str, gradient: Tensor) -> None:
    """Take no notice of a gradient, since another rank compares."""
