"""Process groups as explicit arguments, collectives and messages between their ranks, and counters
of what is sent, except the few numbers that `total` and `largest` reduce.

Collectives have no gradients; algorithms define these by `with_backward`. The time-out of
collectives is set here too; torch 2.11 to 2.13 have no public name for it.

Shapes, as suffixes: s elements that this rank sends, r those that it receives. Tensors without a
suffix may have any shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, distributed_c10d

KINDS = (
    *("all_to_all", "ring", "gather", "state", "tensor", "pipeline", "switch", "experts"),
    *("router", "objective"),
)


class Books:
    """Bytes and messages sent by this rank to other ranks, by kind, since the last `close`.

    They also keep transfers alive until they have been waited for: gloo drops the connection of a
    transfer that nothing references, and ranks would then hang.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._under_way: dict[object, tuple[str, object]] = {}

    def add(self, kind: str, sent_bytes: int, messages: int = 1) -> None:
        """Count bytes that were sent, in this many messages to one receiver each."""
        self.bytes[kind] += sent_bytes
        self.messages[kind] += messages

    def begin(self, transfer: object, what: str, tensors: object) -> None:
        """Record a transfer that must be waited for, and keep it and its tensors alive
        until `end`."""
        self._under_way[transfer] = what, tensors

    def end(self, transfer: object) -> None:
        """Remove a transfer that has been waited for."""
        self._under_way.pop(transfer, None)

    def close(self) -> dict[str, int]:
        """Return the bytes sent by kind, and reset the counts.

        Raises RuntimeError where a transfer has not been waited for: its data may be wrong.
        """
        if self._under_way:
            names = Counter(what for what, _ in self._under_way.values())
            self._under_way.clear()
            listed = ", ".join(f"{count} × {what}" for what, count in sorted(names.items()))
            raise RuntimeError(f"not waited for: {listed}; this is an error in uspft")
        page = {kind: self.bytes[kind] for kind in KINDS if self.bytes[kind]}
        self.bytes.clear()
        self.messages.clear()
        return page


@dataclass(frozen=True)
class Group:
    """A process group: ranks that exchange data, this rank's index among them, and the counters of
    what it sends."""

    handle: dist.ProcessGroup | None = None
    """torch's process group; None for a group of one."""
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    books: Books = field(default_factory=Books)
    hosts: tuple[Group, Group] | None = None
    """Set where the group has several members on each of several hosts, so that collectives are
    hierarchical: its members on this rank's host, and the members with this rank's position on
    every host."""

    @property
    def size(self) -> int:
        return len(self.ranks)


Returned = TypeVar("Returned")
Waited = Callable[[], Tensor]
"""A function that waits for a started transfer and returns its result."""


def with_backward(
    there: Callable[..., Returned], back: Callable[..., Any], *inputs: Tensor
) -> Returned:
    """Return there(*inputs), a tensor or several, as one autograd function.

    back: takes the gradient of each tensor that `there` returns, and returns that of each input. It
    must not reference a tensor computed from the inputs.
    """
    found: Returned = _WithBackward.apply(there, back, *inputs)
    return found


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *x: Tensor) -> Any:
        ctx.back = back
        return there(*x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.back(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def all_to_all(
    x_s: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
    kind: str = "all_to_all",
) -> Tensor:
    """Send piece i of x_s to member i, and return the pieces that arrive: an uneven all-to-all.

    x_s is contiguous and flat, and `send` has the number of elements of each piece. The result has
    the received pieces, of `receive` elements each, in member order. kind: the name under which its
    bytes are counted.
    """
    return start_all_to_all(x_s, send, receive, group, kind)()


def start_all_to_all(
    x_s: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
    kind: str = "all_to_all",
) -> Waited:
    """Start an `all_to_all`, and return the function that waits for its result; it must be called,
    and x_s must not change until then."""
    out_r = x_s.new_empty(sum(receive))
    others = [n for member, n in enumerate(send) if n and member != group.index]
    group.books.add(kind, sum(others) * x_s.element_size(), len(others))
    work = dist.all_to_all_single(
        out_r, x_s, list(receive), list(send), group=group.handle, async_op=True
    )
    transfer = Transfer([work], f"{kind}, an all-to-all", (x_s, out_r), group)
    return partial(_arrived, [transfer], out_r)


class Move(NamedTuple):
    """One transfer of a ring shift: x is sent to member i + offset, and `out` is received from
    member i − offset.

    Empty tensors are neither sent nor received; both ends must agree on that.
    """

    x: Tensor
    out: Tensor
    offset: int


class Transfer:
    """Started operations; calling this waits for them, and must happen before their result is used.

    Until then the books keep their tensors alive; closing the books earlier is an error.
    """

    def __init__(self, works: Sequence[dist.Work], what: str, tensors: object, group: Group):
        self._works, self._books = works, group.books
        if works:
            self._books.begin(self, f"{what}, on rank {group.ranks[group.index]}", tensors)

    def __call__(self) -> None:
        for work in self._works:
            work.wait()
        self._books.end(self)


class Expected(NamedTuple):
    """Receives that were posted before this rank has computed what it sends.

    Messages between two ranks match in the order in which they are posted and sent.
    """

    out: Tensor
    """The tensor that they fill; this rank's own part is written later."""
    works: list[list[dist.Work]]


def shift(
    moves: Sequence[Move], group: Group, kind: str, expected: Expected | None = None
) -> list[Callable[[], None]]:
    """Start all moves, and return for each the function that waits for it, which must be called.

    expected: the receives, if they are already posted.

    gloo announces a receive on the connection by which its own data leaves, so there all receives
    are started first; otherwise another rank's data would wait until this rank has sent, and a
    connection would work in one direction at a time. NCCL completes operations in the order of
    their start, so there a move's send and receive are started together.
    """
    receives, sends, names = [], [], []
    for x, out, offset in moves:
        source, to = (group.ranks[(group.index + d) % group.size] for d in (-offset, offset))
        receives.append(_operation(dist.irecv, out, source, group))
        sends.append(_operation(dist.isend, x, to, group))
        names.append(f"{kind} from rank {source} and to rank {to}")
        if x.numel():
            group.books.add(kind, x.numel() * x.element_size())
    if all(move.x.is_cpu for move in moves):
        arriving = expected.works if expected else [_started(ops) for ops in receives]
        leaving = [_started(ops) for ops in sends]
        works = [a + b for a, b in zip(arriving, leaving, strict=True)]
    else:
        works = [_started(a + b) for a, b in zip(receives, sends, strict=True)]
    started = zip(works, names, moves, strict=True)
    return [Transfer(each, name, move, group) for each, name, move in started]


def _operation(way: Any, tensor: Tensor, peer: int, group: Group) -> list[dist.P2POp]:
    return [dist.P2POp(way, tensor, peer, group=group.handle)] if tensor.numel() else []


def _started(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def sum_over(x: Tensor, group: Group, kind: str) -> Tensor:
    """Sum x over the members, in place and without a gradient; counted as a ring's all-reduce."""
    return _start_reduce(x, group, kind, dist.ReduceOp.SUM)()


def max_over(x: Tensor, group: Group, kind: str) -> Tensor:
    """Take the maximum of x over the members, in place; counted as a ring's all-reduce."""
    return _start_reduce(x, group, kind, dist.ReduceOp.MAX)()


def gather_over(x: Tensor, group: Group, kind: str) -> Tensor:
    """Return all members' x, concatenated along the first dimension in member order: an all-gather.

    x: contiguous, of the same shape on every member. If `group.hosts` is set, each rank first
    gathers from the ranks at its position on other hosts and then inside its host, so that each
    part crosses to a host once; a ring over all members would send all but one part over each
    host's link.
    """
    if group.hosts is None:
        return start_gather(x, group, kind)()
    inside, across = group.hosts
    every = gather_over(gather_over(x, across, kind), inside, kind)
    return _turned(every, inside.size, across.size)


def sum_parts(x: Tensor, group: Group, kind: str) -> Tensor:
    """Return this member's part of the sum over the members: a reduce-scatter.

    x: contiguous, of the same shape on every member; its first dimension consists of one part per
    member, in member order. If `group.hosts` is set, parts are summed inside each host first, so
    that each leaves the host once.
    """
    if group.hosts is None:
        return start_sum_parts(x, group, kind)()
    inside, across = group.hosts
    x = _turned(x, across.size, inside.size)
    return sum_parts(sum_parts(x, inside, kind), across, kind)


def _turned(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x, whose first dimension is a table of rows × columns parts, with the table
    transposed."""
    return x.unflatten(0, (rows, columns, -1)).transpose(0, 1).flatten(0, 2)


def expect_gather(x: Tensor, rows: int, group: Group) -> Expected | None:
    """Post the receives of a `start_gather` of `rows` rows shaped like x's; None if it uses a
    collective instead of messages."""
    if not x.is_cpu or group.size != 2 or group.hosts:
        return None
    out = x.new_empty((2 * rows, *x.shape[1:]))
    return _expected(out, [(out.chunk(2)[1 - group.index], 1)], group)


def expect_parts(x: Tensor, rows: int, group: Group) -> Expected | None:
    """Post the receives of a `start_sum_parts` whose result has `rows` rows shaped like x's; None
    if it uses a collective instead of messages."""
    if not x.is_cpu or group.size == 1 or group.hosts:
        return None
    parts = x.new_empty((group.size, rows, *x.shape[1:]))
    others = [(parts[group.index - d], d) for d in range(1, group.size)]
    return _expected(parts, others, group)


def _expected(out: Tensor, parts: Sequence[tuple[Tensor, int]], group: Group) -> Expected:
    sources = [group.ranks[(group.index - offset) % group.size] for _, offset in parts]
    ops = (
        _operation(dist.irecv, part, at, group)
        for (part, _), at in zip(parts, sources, strict=True)
    )
    return Expected(out, [_started(each) for each in ops])


def start_gather(x: Tensor, group: Group, kind: str, expected: Expected | None = None) -> Waited:
    """Start a `gather_over` without hosts, and return the function that waits for its result.

    The function must be called, and x must not change until then. expected: the receives, if they
    are already posted. In a group of one, or if x is empty, nothing is sent. gloo's all-gather
    between two ranks uses one connection in one direction at a time; there the two exchange
    messages instead.
    """
    if group.size == 1:
        return lambda: x
    out = expected.out if expected else x.new_empty((group.size * len(x), *x.shape[1:]))
    if not x.numel():
        return lambda: out
    if x.is_cpu and group.size == 2:
        parts = out.chunk(2)
        parts[group.index].copy_(x)
        moves = [Move(x, parts[1 - group.index], 1)]
        return partial(_arrived, shift(moves, group, kind, expected), out)
    group.books.add(kind, (group.size - 1) * x.numel() * x.element_size(), group.size - 1)
    work = dist.all_gather_into_tensor(out, x, group=group.handle, async_op=True)
    return partial(_arrived, [Transfer([work], f"{kind}, an all-gather", (x, out), group)], out)


def start_sum_parts(x: Tensor, group: Group, kind: str, expected: Expected | None = None) -> Waited:
    """Start a `sum_parts` without hosts, and return the function that waits for its result.

    The function must be called, and x must not change until then. expected: the receives, if they
    are already posted. In a group of one, or if x is empty, nothing is sent. gloo's reduce-scatter
    is an all-reduce, which sends twice as much, and its all-to-all uses a connection in one
    direction at a time; there parts are sent as messages and added.
    """
    if group.size == 1:
        return lambda: x
    out = x.new_empty((len(x) // group.size, *x.shape[1:]))
    if not x.numel():
        return lambda: out
    if x.is_cpu:
        own = x.unflatten(0, (group.size, -1))
        parts = expected.out if expected else torch.empty_like(own)
        parts[group.index].copy_(own[group.index])
        moves = [
            Move(own[(group.index + d) % group.size], parts[group.index - d], d)
            for d in range(1, group.size)
        ]
        waits = shift(moves, group, kind, expected)
        return lambda: _added(_arrived(waits, parts))
    group.books.add(kind, (group.size - 1) * out.numel() * x.element_size(), group.size - 1)
    work = dist.reduce_scatter_tensor(out, x, group=group.handle, async_op=True)
    return partial(_arrived, [Transfer([work], f"{kind}, a reduce-scatter", (x, out), group)], out)


def start_sum_over(x: Tensor, group: Group, kind: str) -> Waited:
    """Start a `sum_over`, in place, and return the function that waits for it, which must be
    called."""
    return _start_reduce(x, group, kind, dist.ReduceOp.SUM)


def _start_reduce(x: Tensor, group: Group, kind: str, op: dist.ReduceOp.RedOpType) -> Waited:
    if group.size == 1:
        return lambda: x
    others = group.size - 1
    group.books.add(kind, 2 * others * x.numel() * x.element_size() // group.size, 2 * others)
    work = dist.all_reduce(x, op=op, group=group.handle, async_op=True)
    return partial(_arrived, [Transfer([work], f"{kind}, an all-reduce", x, group)], x)


def _added(parts: Tensor) -> Tensor:
    """Return the sum of parts, rounded once; adding two takes a quarter of a reduction's time."""
    return parts[0] + parts[1] if len(parts) == 2 else parts.sum(0)


def _arrived(transfers: Sequence[Callable[[], None]], out: Tensor) -> Tensor:
    for wait in transfers:
        wait()
    return out


def total(values: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """Return the sum of each value over the members, in float64."""
    return _reduce(values, group, device, dist.ReduceOp.SUM)


def largest(values: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """Return the maximum of each value over the members, in float64."""
    return _reduce(values, group, device, dist.ReduceOp.MAX)


def said_by_all(mine: str) -> list[str]:
    """Return the message of each rank of the default group, in rank order; collective."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def _reduce(
    values: Sequence[float], group: Group, device: torch.device, op: dist.ReduceOp.RedOpType
) -> list[float]:
    x = torch.tensor(values, dtype=torch.float64, device=device)
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return list(x.tolist())


FIRST_STEP = 3
"""Factor on the time-out of collectives during the first step: ranks load weights, choose kernels
and compile at different speeds."""


def deadline(minutes: float, *, first_step: bool = False) -> timedelta:
    """Return how long a collective may wait, by `launch.timeout_minutes`."""
    return timedelta(minutes=minutes * (FIRST_STEP if first_step else 1))


def set_deadline(limit: timedelta) -> None:
    """Set the time-out of collectives in every process group that this process has now.

    DeepSpeed's groups are among them. A wait that has begun keeps its earlier time-out.
    """
    for handle in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, handle)


def limit_of(handle: ProcessGroup, device: torch.device) -> timedelta:
    """Return the time-out of a process group for tensors of a device."""
    limit: timedelta = handle._get_backend(device).options._timeout
    return limit
