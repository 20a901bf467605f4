"""A world is a layout made live: its process groups, its algorithm and its kernel.

Several may be alive at once, and the one that a row is split by travels with its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Books
from uspft.config.algorithms import AlgorithmRow
from uspft.kernels import Kernel
from uspft.layout import Layout
from uspft.mesh import Groups, Mesh, make_mesh
from uspft.segments import Segments
from uspft.sequence import Algorithm, Attend, Rule, Share, Split
from uspft.sequence.rows.share import Order
from uspft.tensor import TensorAlgorithm


@dataclass(frozen=True, eq=False)
class World:
    """What a layout needs at run time, all of it as values: nothing is looked up elsewhere."""

    mesh: Mesh
    row: AlgorithmRow
    """The algorithm's row in the table of algorithms."""
    algorithm: Algorithm
    tensor: TensorAlgorithm
    """How matrices are split over the mesh's tensor ranks."""
    kernel: Kernel
    books: Books
    """The books in which this layout's transfers enter what they send."""
    device: torch.device

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def replica(self) -> int:
        """The index of the data-parallel replica that this rank belongs to."""
        return self.layout.coordinates(self.mesh.rank)["data"]

    @property
    def name(self) -> str:
        """The layout's short name, as metrics.jsonl has it."""
        return self.layout.name(self.row.name)

    def share(self, rows: Sequence[Segments], orders: Sequence[Order] | None = None) -> Share:
        """Return this rank's share of a micro-batch.

        Rows are laid end to end: position p of row i counts as p + the length of the rows before
        it. Every rank derives everybody's part from the same document bounds, so nothing is
        negotiated. orders: the rows' token orders, where they are at hand.
        """
        if orders is None:
            orders = [self.algorithm.token_order(row) for row in rows]
        return Share(rows, orders, (self.layout.ulysses, self.mesh.context.index))

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        share: Share,
        rule: Rule,
        inside: Callable[[Attend, tuple[Tensor, ...]], Tensor] | None = None,
    ) -> Tensor:
        """Return attention's output [T, H, D] for this rank's tokens, differentiable.

        qkv: q [T, H, D], k and v [T, G, D] of the same tokens. inside: as of Split.
        """
        split = Split(self.mesh.ulysses, self.mesh.ring, self.kernel, inside)
        return self.algorithm.attend(qkv, share.with_window(rule.window), rule, split)


def make_world(
    layout: Layout,
    named: tuple[AlgorithmRow, Algorithm, TensorAlgorithm],
    kernel: Kernel,
    device: torch.device,
    groups: Groups,
) -> World:
    """Make a layout live; collective over the default group, in the same order on every rank.

    named: the row of the table of the algorithm that shares rows, that algorithm, and the one that
    splits matrices.
    """
    books = Books()
    return World(make_mesh(layout, groups, books), *named, kernel, books, device)
