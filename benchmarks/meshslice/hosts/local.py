"""One rank's part of a flow: what it multiplies and what it sends, together and alone.

Shapes, as suffixes: t tokens of this mesh row; h hidden size, which is sliced; f features of this
mesh column; R mesh rows, C mesh columns; S slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import start_gather, start_sum_parts
from uspft.planner.mesh import Flow
from uspft.tensor import Grid

KIND = "tensor"


@dataclass(frozen=True)
class Local:
    """A rank's part of one flow on a mesh."""

    flow: Flow
    tokens: int
    hidden: int
    features: int
    grid: Grid

    def operands(self) -> tuple[Tensor, Tensor]:
        """This draws the two matrices, as benchmarks/meshslice/engines takes them."""
        t, h, f = self.tokens, self.hidden, self.features
        rows, columns = self.grid.rows.size, self.grid.columns.size
        draw = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        a = torch.randn(t, f if self.flow == "left" else h // columns, generator=draw)
        b = torch.randn(t if self.flow == "right" else h // rows, f, generator=draw)
        return a, b

    def products(self, slices: int = 1) -> Callable[[], Tensor]:
        """This returns a call that makes the products of all slices, and moves nothing."""
        t, h, f = self.tokens, self.hidden, self.features
        width = h // slices
        if self.flow == "output":
            left, right, out = torch.randn(t, width), torch.randn(width, f), torch.zeros(t, f)
        elif self.flow == "left":
            left, right, out = torch.randn(t, f), torch.randn(width, f).t(), torch.zeros(t, width)
        else:
            left, right, out = torch.randn(t, width).t(), torch.randn(t, f), torch.zeros(width, f)

        def multiply() -> Tensor:
            for number in range(slices):
                out.addmm_(left, right, beta=int(self.flow == "output" and number > 0))
            return out

        return multiply

    def transfers(self) -> Callable[[], None]:
        """This returns a call that moves both ways what the flow moves, and multiplies nothing."""
        a, b = self.operands()
        t, h, f = self.tokens, self.hidden, self.features
        rows, columns = self.grid.rows, self.grid.columns
        parts = columns.size * t, h // columns.size
        made = torch.zeros(parts if self.flow == "left" else (h, f))

        def move() -> None:
            if self.flow == "left":
                waits = start_gather(b, rows, KIND), start_sum_parts(made, columns, KIND)
            else:
                along = start_gather(a, columns, KIND)
                down = start_gather if self.flow == "output" else start_sum_parts
                waits = along, down(b if self.flow == "output" else made, rows, KIND)
            for wait in waits:
                wait()

        return move
