"""The transfers that algorithms use; their gradients are the algorithms' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from uspft.comm.group import Group


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Uneven all-to-all of flat pieces: piece i of x goes to member i.

    x: [sum(send)], contiguous; result: [sum(receive)], pieces in member order.
    """
    out = x.new_empty(sum(receive))
    others = [n for member, n in enumerate(send) if n and member != group.index]
    group.books.add("all_to_all", sum(others) * x.element_size(), len(others))
    dist.all_to_all_single(out, x, list(receive), list(send), group=group.handle)
    return out


def shift(x: Tensor, out: Tensor, offset: int, group: Group, kind: str) -> Callable[[], None]:
    """Start sending x to the member `offset` further on, and receiving into out from as far back.

    An empty x or out is not sent or awaited; both ends must agree on that. Returns the function
    that waits for both; x and out must live until then.
    """
    ops = []
    if x.numel():
        to = group.ranks[(group.index + offset) % group.size]
        ops.append(dist.P2POp(dist.isend, x, to, group=group.handle))
        group.books.add(kind, x.numel() * x.element_size())
    if out.numel():
        source = group.ranks[(group.index - offset) % group.size]
        ops.append(dist.P2POp(dist.irecv, out, source, group=group.handle))
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def sum_over(x: Tensor, group: Group, kind: str) -> Tensor:
    """x summed over the members, in place, without a gradient; counted as a ring's all-reduce."""
    if group.size > 1:
        others = group.size - 1
        group.books.add(kind, 2 * others * x.numel() * x.element_size() // group.size, 2 * others)
        dist.all_reduce(x, group=group.handle)
    return x


def total(values: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """Sums over the members, in float64."""
    return _reduce(values, group, device, dist.ReduceOp.SUM)


def largest(values: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """Maxima over the members, in float64."""
    return _reduce(values, group, device, dist.ReduceOp.MAX)


def _reduce(
    values: Sequence[float], group: Group, device: torch.device, op: dist.ReduceOp.RedOpType
) -> list[float]:
    x = torch.tensor(values, dtype=torch.float64, device=device)
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return list(x.tolist())
