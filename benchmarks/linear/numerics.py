"""How far a long row is off that ranks compute in parts, with what they exchange in float32 and in
bfloat16.

    python -m benchmarks.linear.numerics FOLDER RANK    (a rank; benchmarks.linear starts them)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.linear.inputs import GATES, inputs, rule, written_out
from uspft.comm import Group
from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence import states
from uspft.sequence.rows.share import Order, Share
from uspft.sequence.states import Mixed, StateRule, mix_over_states

MODULE = "benchmarks.linear.numerics"


def measured(setting: dict[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """Return for each gate how far off one process and the ranks are, at the most and as a root
    mean square, in shares of the largest and of the mean square of what is right; collective."""
    torch.set_grad_enabled(False)
    tokens, sizes = setting["tokens"], StateSizes(*setting["sizes"])
    ranks, mine = dist.get_world_size(), dist.get_rank()
    group = Group(dist.group.WORLD, tuple(range(ranks)), mine)
    size, run = tokens // ranks, rule()
    order: Order = [((n * size, (n + 1) * size),) for n in range(ranks)]
    share = Share([Segments.single(tokens)], [order], (1, mine))
    found = []
    for gate in GATES:
        every = inputs(tokens, sizes, gate)
        whole = Mixed(*(x.float() for x in every))
        part = Mixed(*(x[mine * size : (mine + 1) * size] for x in whole))
        run_part = partial(mix_over_states, part, share.chains, run, group)
        parts = {"float32": _joined(run_part()), "bfloat16": _joined(_rounded(run_part))}
        if mine == 0:
            found.append({"gate": gate} | _errors(every, whole, parts, run))
        dist.barrier()
        tell(f"{gate} done")
    return found


def _errors(
    every: Mixed, whole: Mixed, parts: dict[str, Tensor], run: StateRule
) -> dict[str, list[float]]:
    want = written_out(every)
    outs = {"one process": run(whole, None)[0], **parts}
    return {name: _off(out.double(), want) for name, out in outs.items()}


def _off(out: Tensor, want: Tensor) -> list[float]:
    off = out - want
    most = float(off.abs().max() / want.abs().max())
    return [most, float((off.square().mean() / want.square().mean()).sqrt())]


def _joined(out: Tensor) -> Tensor:
    every = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(every, out.contiguous())
    return torch.cat(every)


def _rounded(run: Callable[[], Tensor]) -> Tensor:
    """Return what run makes where summaries travel in bfloat16."""
    send = states.all_to_all

    def rounded(x: Tensor, *rest: Any) -> Tensor:
        return send(x.bfloat16().to(x.dtype), *rest)

    with patch.object(states, "all_to_all", rounded):
        return run()


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
