"""The live bytes of one forward and one backward, whoever's they are.

There is no engine: the gradient of a parameter is let go of when it has come, as ZeRO does that
sums it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory.livebytes import LiveBytes


@dataclass(frozen=True)
class Counted:
    """The live bytes of one forward and backward on one rank, parameters not counted."""

    kept_bytes: int
    """What is alive between forward and backward."""
    host_bytes: int
    """What waits on the host."""
    layer_bytes: tuple[int, int]
    """What one layer adds to either: of several the second, whose input is the first's output."""
    most_bytes: dict[str, int] = field(default_factory=dict)
    """The most that is alive at once, in the forward, and in the backward."""


@contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one of so many ranks, none of which sends anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        # torch asks for the backend of the device, and meta has none. As in a run, there is a work
        # to wait for, until which what is sent stays alive.
        work = SimpleNamespace(wait=lambda: None)
        with patch.object(dist, "batch_isend_irecv", lambda operations: [work]):
            yield
    finally:
        dist.destroy_process_group()


def measure(
    module: nn.Module,
    layers: Sequence[nn.Module],
    loss_of: Callable[[], Tensor],
    counting: LiveBytes | None = None,
) -> Counted:
    """Count what a module's loss and its backward have alive.

    layers: of the model, which run one after another.
    """
    counting = counting_of(module, counting)
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        seen.append((counting.live, counting.host))

    layers[0].register_forward_pre_hook(look)
    for layer in layers:
        layer.register_forward_hook(look)
    with counting:
        with counting.during("forward"):
            loss = loss_of()
        kept, (one, two) = counting.live, seen[len(layers) > 1 :][:2]
        with counting.during("backward"):
            loss.backward()
    added = two[0] - one[0], two[1] - one[1]
    return Counted(kept, counting.host, added, dict(counting.most))


def counting_of(module: nn.Module, counting: LiveBytes | None = None) -> LiveBytes:
    """Return what counts a module's live bytes, its parameters and their gradients aside."""
    counting = counting or LiveBytes()
    counting.ignore(module.parameters())
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_let_go)
    return counting


def _let_go(parameter: Tensor) -> None:
    if getattr(parameter, "ds_grad_is_ready", True):  # DeepSpeed's tiles say when it is whole
        parameter.grad = None
