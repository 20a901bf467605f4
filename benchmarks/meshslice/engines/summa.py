"""SUMMA: panel after panel of what travels is broadcast by the ranks that hold it, or where it is
of the output, summed to them; the next panel is on its way while one is multiplied."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import Any

import torch.distributed as dist
from torch import Tensor

from uspft.comm import Group
from uspft.tensor import Grid


def flows(times: int) -> Any:
    """This returns the three flows with so many times the least number of panels."""
    return {
        "output": partial(output_stationary, times=times),
        "left": partial(left_stationary, times=times),
        "right": partial(right_stationary, times=times),
    }


def output_stationary(a: Tensor, b: Tensor, grid: Grid, times: int) -> Tensor:
    out = a.new_zeros(len(a), b.shape[1])
    along = Panels(a.shape[1], grid.columns, grid, times)
    down = Panels(len(b), grid.rows, grid, times)
    ahead = along.start(a, 1, 0), down.start(b, 0, 0)
    for number in range(along.number):
        (left, *wait_a), (right, *wait_b) = ahead
        for work in (*wait_a, *wait_b):
            work.wait()
        if number + 1 < along.number:
            ahead = along.start(a, 1, number + 1), down.start(b, 0, number + 1)
        out.addmm_(left, right)
    return out


def left_stationary(a: Tensor, w: Tensor, grid: Grid, times: int) -> Tensor:
    down = Panels(len(w), grid.rows, grid, times)
    wide = len(w) * grid.rows.size // grid.columns.size
    out = Panels(wide, grid.columns, grid, times)
    made, ahead = a.new_empty(len(a), wide), down.start(w, 0, 0)
    for number in range(down.number):
        panel, *waits = ahead
        for work in waits:
            work.wait()
        if number + 1 < down.number:
            ahead = down.start(w, 0, number + 1)
        out.collect(a @ panel.t(), made, 1, number)
    return made


def right_stationary(a: Tensor, b: Tensor, grid: Grid, times: int) -> Tensor:
    along = Panels(a.shape[1], grid.columns, grid, times)
    long = a.shape[1] * grid.columns.size // grid.rows.size
    out = Panels(long, grid.rows, grid, times)
    made, ahead = a.new_empty(long, b.shape[1]), along.start(a, 1, 0)
    for number in range(along.number):
        panel, *waits = ahead
        for work in waits:
            work.wait()
        if number + 1 < along.number:
            ahead = along.start(a, 1, number + 1)
        out.collect(panel.t() @ b, made, 0, number)
    return made


class Panels:
    """The panels of a dimension that the ranks of a group hold in blocks of `held`."""

    def __init__(self, held: int, group: Group, grid: Grid, times: int) -> None:
        self.group = group
        self.number = times * lcm(grid.rows.size, grid.columns.size)
        self.width, left = divmod(held * group.size, self.number)
        if left:
            raise ValueError(f"{self.number} panels do not divide {held * group.size}")

    def start(self, x: Tensor, dim: int, number: int) -> tuple[Any, ...]:
        """This starts a panel's broadcast, and returns the panel and what is to be waited for."""
        owner, first = self._place(number)
        mine = owner == self.group.index
        panel = x.narrow(dim, first, self.width) if mine else self._empty(x, dim)
        panel = panel.contiguous()
        if self.group.size == 1:
            return (panel,)
        source = self.group.ranks[owner]
        return panel, dist.broadcast(panel, source, group=self.group.handle, async_op=True)

    def collect(self, part: Tensor, out: Tensor, dim: int, number: int) -> None:
        """This sums a panel of the output over the group, to where its owner has it."""
        owner, first = self._place(number)
        if self.group.size > 1:
            dist.reduce(part, self.group.ranks[owner], group=self.group.handle)
        if owner == self.group.index:
            out.narrow(dim, first, self.width).copy_(part)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the member that holds a panel, and where its block has it."""
        owner, place = divmod(number, self.number // self.group.size)
        return owner, place * self.width

    def _empty(self, x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = self.width
        return x.new_empty(shape)
