"""The seconds of calls that take turns, on the slowest rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Seconds = dict[str, list[float]]
LARGEST_ERROR = 1e-4
"""Of the largest value; float32 is summed in different orders."""


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    """This returns the seconds of each call in each round; all have been called before.

    In a round all calls take a turn, from another starting point each time.
    """
    gc.collect()
    gc.freeze()  # a collection before every call need not walk through all packages again
    names = list(calls)
    found: Seconds = {}
    for number in range(rounds):
        turn = number * len(names) // rounds  # nobody always comes after the same one
        for name in names[turn:] + names[:turn]:
            found.setdefault(name, []).append(slowest_seconds(calls[name]))
    return found


def slowest_seconds(call: Callable[[], object]) -> float:
    """This returns the seconds that a call takes on the slowest rank; collective."""
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    call()
    mine = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def require_same(calls: Mapping[str, Callable[[], Tensor]]) -> None:
    """This calls each, which warms it up. Raises RuntimeError where two results differ."""
    first: Tensor | None = None
    for name, call in calls.items():
        made = call()
        first = made if first is None else first
        off = float((made - first).abs().max() / first.abs().max())
        if not off < LARGEST_ERROR:
            raise RuntimeError(f"{name} is off by {off:.1e} from {next(iter(calls))}")
