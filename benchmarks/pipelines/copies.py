"""Copies by turns (`fine_grain_interleave`) on two hosts of one process with a core each: blocks
whose matrices two ranks split, beside their computation alone and their transfers alone.

One rank on its host: python -m benchmarks.pipelines.copies FOLDER RANK.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.meshslice.hosts.block import model_of, step_of, world_of
from benchmarks.meshslice.hosts.turns import in_turns, require_same
from uspft.comm import Move, shift
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.tensor.megatron import Megatron

HOSTS = 2
COMPUTATION, TRANSFERS = "computation alone", "transfers alone"
AT_ONCE = "both, neither waiting for the other"
SHIFT = "uspft.comm.shift"
"""What every transfer between two ranks goes through."""


@dataclass(frozen=True)
class Setting:
    """A launch. mbit: of each host's link. copies: those that take turns; the first is 1."""

    mbit: int
    rounds: int
    layers: int
    hidden: int
    tokens: int
    copies: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        heads = f"{self.hidden // 64} heads"
        return (
            f"{self.layers} blocks × {self.hidden}, {heads}, a row of {self.tokens:,} tokens, "
            f"`model_parallel: 2`, `use_seq_parallel`, {self.mbit} Mbit/s, float32"
        )

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON keeps of it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Setting:
        return cls(**{**record, "copies": tuple(record["copies"])})

    @property
    def shape(self) -> ModelShape:
        """The shape of the model of these blocks."""
        heads = self.hidden // 64
        sizes = self.hidden, self.layers, heads, heads // 2, 64, 4 * self.hidden, 256, self.tokens
        return ModelShape("llama", *sizes, None, False, False, {})


def measured(record: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the seconds of a forward and backward by copies, what bounds them, and what a rank
    sends in one."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    setting = Setting.of(record)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    groups, layout = Groups(), Layout(HOSTS)
    model = model_of(setting.shape, layout, groups, copies=True)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for number in setting.copies:
        world = world_of(layout, Megatron(HOSTS, splits_tokens=True, copies=number), groups)
        calls[str(number)] = step_of(model, world, setting.tokens, setting.hidden)
    require_same(calls)
    whole = calls[str(setting.copies[0])]
    with recorded() as moves:
        whole()
    sent = sum(one.x.numel() * one.x.element_size() for each, _ in moves for one in each)
    tell(f"{len(moves)} transfers of {sent / 2**20:.1f} MiB in all")

    def computation() -> None:
        with nothing_moves():
            whole()

    def at_once() -> None:
        with nothing_waits():
            whole()

    bounds = {COMPUTATION: computation, TRANSFERS: lambda: moved(moves), AT_ONCE: at_once}
    for call in bounds.values():
        call()
    return {"sent_bytes": sent, "seconds": in_turns({**bounds, **calls}, setting.rounds)}


Moves = list[tuple[Sequence[Move], Any]]


@contextmanager
def recorded() -> Iterator[Moves]:
    """Keep what is moved meanwhile, in order, with the group that it is moved in."""
    found: Moves = []

    def kept(moves: Sequence[Move], group: Any, kind: str, *expected: Any) -> Any:
        found.append((moves, group))
        return shift(moves, group, kind, *expected)

    with patch(SHIFT, kept):
        yield found


@contextmanager
def nothing_moves() -> Iterator[None]:
    """Let transfers come at once, with what happens to lie there."""

    def at_once(moves: Sequence[Move], group: Any, kind: str, *_: Any) -> list[Callable[[], None]]:
        return [lambda: None for _ in moves]

    with patch(SHIFT, at_once):
        yield


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Let transfers begin where they do, and be awaited at the end: what is computed meanwhile is
    with what happens to lie there."""
    under_way: list[Callable[[], None]] = []

    def begun(
        moves: Sequence[Move], group: Any, kind: str, *expected: Any
    ) -> list[Callable[[], None]]:
        under_way.extend(shift(moves, group, kind, *expected))
        return [lambda: None for _ in moves]

    with patch(SHIFT, begun):
        yield
    for wait in under_way:
        wait()


def moved(every: Moves) -> None:
    """Move what was recorded, one transfer after another."""
    for moves, group in every:
        for wait in shift(moves, group, "tensor"):
            wait()


def rate_mbit(sent: int, seconds: float) -> int:
    """Return the Mbit/s at which so many bytes take so many seconds."""
    return max(1, math.ceil(8e-6 * sent / seconds))


def bound(computation: float, transfers: float, copies: int) -> float:
    """Return the least seconds of copies by turns: the larger of both, and of the smaller one what
    the first copy or the last has nothing to hide behind."""
    return max(computation, transfers) + min(computation, transfers) / copies


def way_gone(seconds: dict[str, list[float]], copies: int, longer: str | None = None) -> float:
    """Return how much of the way from whole blocks to the bound so many copies go.

    longer: what is taken for the larger of both; None: the larger.
    """
    middle = {name: median(each) for name, each in seconds.items()}
    both = middle[COMPUTATION], middle[TRANSFERS]
    least = bound(*both, copies) + (middle[longer] - max(both) if longer else 0.0)
    return float((middle["1"] - middle[str(copies)]) / (middle["1"] - least))


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
