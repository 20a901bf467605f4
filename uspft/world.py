"""World = a layout made live: groups, algorithm, kernel. Several may be alive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.batch import Segments
from uspft.comm import Books
from uspft.kernels import Kernel
from uspft.layout import Layout
from uspft.mesh import Mesh, make_mesh
from uspft.sequence import Algorithm, Plan, Rule, Split

Run = tuple[int, int]


@dataclass(frozen=True)
class World:
    """What a layout needs at run time. Everything is a value; nothing is looked up elsewhere."""

    mesh: Mesh
    algorithm: Algorithm
    kernel: Kernel
    books: Books
    device: torch.device

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def replica(self) -> int:
        """Which of the data-parallel replicas this rank belongs to."""
        return self.layout.coordinates(self.mesh.rank)["data"]

    def share(self, rows: Sequence[Segments]) -> tuple[Plan, list[Run]]:
        """This rank's attention plan for a micro-batch, and the positions it holds of it.

        Rows are laid end to end: position p of row i counts as p + the rows before it. Every rank
        derives everybody's part from the same document bounds: nothing is negotiated.
        """
        orders = [self.algorithm.token_order(row) for row in rows]
        plan = Plan(rows, orders, (self.layout.ulysses, self.mesh.ring.index))
        held, offset = [], 0
        for row, order in zip(rows, orders, strict=True):
            held += [(offset + a, offset + b) for a, b in order[self.mesh.context.index]]
            offset += row.length
        return plan, held

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule) -> Tensor:
        """Attention out [T, H, D] of this rank's tokens; q [T, H, D], k and v [T, G, D]."""
        split = Split(self.mesh.ulysses, self.mesh.ring, self.kernel)
        return self.algorithm.attend(qkv, plan.with_window(rule.window), rule, split)


def make_world(
    layout: Layout,
    algorithm: Algorithm,
    kernel: Kernel,
    device: torch.device,
) -> World:
    """Bring a layout to life; collective over the default group, in the same order everywhere."""
    books = Books()
    mesh = make_mesh(layout, books)
    return World(mesh, algorithm, kernel, books, device)
