"""Access to weights and Adam moments by parameter name, however an engine shards them; and the
AdamW that all engines use.

Each rank with a part of a parameter (parameters/shards.py) stores a fragment [start, stop) of the
flattened part. A rank reads its own fragments directly; `gather` sends values to other ranks, each
at most once per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.comm import largest, total
from uspft.tensor.parts import Part, as_slices

if TYPE_CHECKING:
    from uspft.config.recipe import OptimizerBlock
    from uspft.parameters.shards import Holders

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
GRADIENT = "gradient"
"""A further kind, between a step's last backward pass and its update: the gradient, summed over all
ranks and micro-batches, before it is clipped."""
BATCH_BYTES = 1 << 28
"""The number of bytes that `gather` sends at one time, to all ranks together."""

Interval = tuple[int, int]


class Keeper(Protocol):
    """The part of an engine that this file uses: the weights and Adam moments that it stores."""

    holders: Holders
    """The shards and process groups in which parameters are stored between steps."""
    device: torch.device
    named: Mapping[str, nn.Parameter]
    """Every parameter by its Hugging Face name; between steps its values may be elsewhere."""
    adam: torch.optim.Optimizer

    @cached_property
    def fragments(self) -> Fragments:
        """The table of which rank stores which values; collective at its first use."""
        return Fragments(self)

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in float64; collective."""
        return total(values, self.holders.everyone, self.device)

    def largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks, in float64; collective."""
        return largest(values, self.holders.everyone, self.device)

    def part_of(self, name: str) -> Part:
        """Return the part of a parameter that this rank and those of its `zero_of` group store
        together."""
        return self.holders.part(name)

    def fragment(self, name: str, kind: str) -> tuple[int, Tensor]:
        """Return (start, flat values) of this rank's fragment of its part of a parameter.

        It is the whole part if ZeRO does not shard it. Nothing is moved. A frozen parameter has
        only its weight, in the compute dtype. kind: one of `KINDS`, or `GRADIENT`.
        """
        ...


class Wanted(NamedTuple):
    """A request to send float32 values of a parameter to a rank.

    kind: one of `KINDS`, for the master weight or an Adam moment, or `GRADIENT`. part: which of the
    values. to: the rank.
    """

    kind: str
    name: str
    part: Part
    to: int


class Fragments:
    """A table of which rank stores which values of each parameter's part.

    It is gathered from all ranks once, at construction; collective.
    """

    def __init__(self, engine: Keeper) -> None:
        own: dict[str, Interval] = {}
        for name in engine.named:
            start, values = engine.fragment(name, "weight")
            if values.numel():
                own[name] = (start, start + values.numel())
        everyone = engine.holders.everyone
        every: list[Any] = [own]
        if everyone.size > 1:
            every = [None] * everyone.size
            dist.all_gather_object(every, own, group=everyone.handle)
        self._by_rank: list[dict[str, Interval]] = every
        self._engine = engine

    def sources(self, wanted: Wanted) -> list[tuple[int, Interval]]:
        """Return (rank, interval of its own part) pairs that cover each wanted value once."""
        shards, shape = self._engine.holders.shards, wanted.part.shape
        found: list[tuple[int, Interval]] = []
        for part, ranks in shards.parts(wanted.name, shape).items():
            if next(wanted.part.meets(part), None) is None:
                continue
            covered = 0
            keeping = [(r, held) for r in ranks if (held := self._by_rank[r].get(wanted.name))]
            # Where several ranks have the same values, the receiving rank itself comes first.
            keeping.sort(key=lambda one: (one[1], one[0] != wanted.to, one[0]))
            for rank, (start, stop) in keeping:
                if stop > covered:
                    found.append((rank, (max(start, covered), stop)))
                    covered = stop
        return found


def gather(engine: Keeper, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, Tensor]]:
    """Yield each part that is wanted on this rank, float32 on the engine's device, in order;
    collective.

    Every rank calls it with the same list and consumes all results. Parts are sent in batches of at
    most BATCH_BYTES, or of one part, which bounds memory. If only one rank wants parts, it has at
    most one batch in memory.
    """
    rank = engine.holders.everyone.index
    for _, batch in groupby(_numbered(wanted), key=lambda pair: pair[0]):
        items = [one for _, one in batch]
        pieces = _exchange(engine, items)
        for number, one in enumerate(items):
            if one.to == rank:
                yield one, _assembled(engine, one, pieces.pop(number))


@contextmanager
def on_first_rank(
    engine: Keeper, names: Sequence[str], kind: str = "weight"
) -> Iterator[Callable[[str], Tensor] | None]:
    """Yield on rank 0 a function that reads whole float32 values; collective.

    It must read each of `names` once, in this order. On other ranks it is None, and the rank sends
    its values.
    """
    wanted = [Wanted(kind, name, Part.whole(engine.part_of(name).shape), 0) for name in names]
    coming = gather(engine, wanted)

    def read(name: str) -> Tensor:
        one, value = next(coming)
        if one.name != name:
            raise RuntimeError(f"{name} was asked for, and {one.name} came")
        return value

    yield read if engine.holders.rank == 0 else None
    deque(coming, 0)


def _numbered(wanted: Iterable[Wanted]) -> Iterator[tuple[int, Wanted]]:
    """Yield each wanted part with the index of its batch."""
    number = size = 0
    for one in wanted:
        size += 4 * one.part.count
        if size > BATCH_BYTES:
            number, size = number + 1, 4 * one.part.count
        yield number, one


def _exchange(engine: Keeper, items: Sequence[Wanted]) -> dict[int, list[tuple[int, Tensor]]]:
    """Exchange the values of one batch over all ranks.

    Returns, for each part wanted on this rank, by its number, (source, flat values) pairs.
    """
    everyone, device = engine.holders.everyone, engine.device
    rank = everyone.index
    sources = [engine.fragments.sources(one) for one in items]
    leaving: list[list[Tensor]] = [[] for _ in range(everyone.size)]
    coming = [0] * everyone.size
    for one, each in zip(items, sources, strict=True):
        for source, (start, stop) in each:
            if source == rank:
                at, values = engine.fragment(one.name, one.kind)
                leaving[one.to].append(values[start - at : stop - at].to(device, torch.float32))
            if one.to == rank:
                coming[source] += stop - start
    own = leaving[rank]  # not sent
    leaving[rank], coming[rank] = [], 0
    empty = torch.empty(0, dtype=torch.float32, device=device)
    out = torch.empty(sum(coming), dtype=torch.float32, device=device)
    if everyone.size > 1:
        sizes = [sum(piece.numel() for piece in pieces) for pieces in leaving]
        send = torch.cat([piece for pieces in leaving for piece in pieces] or [empty])
        dist.all_to_all_single(out, send, coming, sizes, group=everyone.handle)
    received = list(out.split(coming))
    received[rank] = torch.cat(own) if own else empty
    found: dict[int, list[tuple[int, Tensor]]] = {}
    at_source = [0] * everyone.size
    for number, (one, each) in enumerate(zip(items, sources, strict=True)):
        if one.to != rank:
            continue
        found[number] = []
        for source, (start, stop) in each:
            at = at_source[source]
            found[number].append((source, received[source][at : at + stop - start]))
            at_source[source] += stop - start
    return found


def _assembled(engine: Keeper, one: Wanted, came: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Assemble a wanted part from the values of its sources."""
    shards = engine.holders.shards
    whole = one.part
    by_part: dict[Part, list[Tensor]] = {}
    for rank, piece in came:
        by_part.setdefault(shards.part(one.name, whole.shape, rank), []).append(piece)
    if list(by_part) == [whole]:
        return torch.cat(by_part[whole]).view(whole.size)
    out = torch.empty(whole.size, dtype=torch.float32, device=engine.device)
    for part, pieces in by_part.items():
        values = torch.cat(pieces).view(part.size)
        for here, there in whole.meets(part):
            out[as_slices(here)] = values[as_slices(there)]
    return out


def adam_steps(engine: Keeper) -> int:
    """Return how many updates Adam's bias correction has counted."""
    counts = {int(state["step"]) for state in engine.adam.state.values() if "step" in state}
    return counts.pop() if counts else 0


def set_adam_steps(engine: Keeper, steps: int) -> None:
    for state in engine.adam.state.values():
        count: Any = state["step"]
        if isinstance(count, torch.Tensor):
            count.fill_(steps)
        else:
            state["step"] = steps


def adamw(
    decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter], options: OptimizerBlock
) -> torch.optim.AdamW:
    """Return AdamW over parameters, of which only `decayed` have weight decay: those that are not
    1-D."""
    groups = [
        {"params": list(decayed), "weight_decay": options.weight_decay},
        {"params": list(plain), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=True,  # otherwise every step allocates 4 or 8 more bytes per parameter
    )


def start_moments(adam: torch.optim.Optimizer) -> None:
    """Create Adam's states before its first step, all 0."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            zeros = [torch.zeros_like(parameter) for _ in range(2)]
            count = torch.zeros((), device=parameter.device)
            adam.state[parameter] = {"step": count, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
