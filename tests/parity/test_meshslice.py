"""The flows of MeshSlice against dense products in float64, forward and both gradients."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import spawn
from uspft.comm import Books, Group
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.tensor.flows import Slices
from uspft.tensor.meshslice import MeshSlice

HIDDEN = 48
TOKENS = (3, 0, 5, 2)
"""Tokens of each mesh row: unequal, and none for one of them."""
OUTPUTS = (8, 24)


class Grid(NamedTuple):
    rows: Group
    columns: Group


def make_grid(rows: int, columns: int, groups: Groups, rank: int) -> Grid:
    layout, books = Layout(columns, ring=rows, mesh_rows=rows, blocks=True), Books()
    ways = ("mesh_rows", "mesh_columns")
    return Grid(*(groups.of(layout.groups([way]), rank, books) for way in ways))


def mine(x: Tensor, grid: Grid) -> Tensor:
    """A rank's part of a matrix on the mesh."""
    part = x.chunk(grid.rows.size)[grid.rows.index]
    return part.chunk(grid.columns.size, 1)[grid.columns.index]


def off(rank: int, meshes: list[tuple[int, int]]) -> dict[Any, float]:
    """The largest difference to dense products, by mesh, slices and what is compared."""
    groups, found = Groups(), {}
    for rows, columns in meshes:
        grid = make_grid(rows, columns, groups, rank)
        both = gcd(HIDDEN // rows, HIDDEN // columns)
        for slices in (s for s in range(1, both + 1) if both % s == 0):
            for name, value in differences(grid, slices).items():
                found[rows, columns, slices, name] = value
    return found


def differences(grid: Grid, slices: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(1)
    rows, columns = grid.rows.size, grid.columns.size
    tokens = TOKENS[:rows] if rows > 1 else TOKENS[-2:-1]
    first = sum(tokens[: grid.rows.index])
    here = slice(first, first + tokens[grid.rows.index])

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    x = drawn(sum(tokens), HIDDEN).requires_grad_()
    inward = [drawn(o, HIDDEN).requires_grad_() for o in OUTPUTS]
    outward = drawn(HIDDEN, OUTPUTS[1]).requires_grad_()
    slopes = [drawn(sum(tokens), o) for o in (*OUTPUTS, HIDDEN)]
    made = [x @ w.t() for w in inward]
    out = made[1] @ outward.t()
    sum((y * s).sum() for y, s in zip([*made, out], slopes, strict=True)).backward()

    def features(y: Tensor) -> Tensor:
        return y[here].chunk(columns, 1)[grid.columns.index]

    own_x = features(x.detach()).requires_grad_()
    own_in = [mine(w.detach().t(), grid).t().contiguous().requires_grad_() for w in inward]
    own_out = mine(outward.detach(), grid).contiguous().requires_grad_()
    algorithm = MeshSlice(rows * columns, (rows, columns), (slices,) * 4)
    got = algorithm.inward(own_x, own_in, grid, 0)
    end = algorithm.outward(got[1], own_out, grid, 1)
    sum((y * features(s)).sum() for y, s in zip([*got, end], slopes, strict=True)).backward()
    pairs = {
        "into a block": (got[0], features(made[0])),
        "out of a block": (end, features(out)),
        "gradient of the input": (own_x.grad, features(x.grad)),
        "gradient of a first weight": (own_in[0].grad, mine(inward[0].grad.t(), grid).t()),
        "gradient of a second weight": (own_in[1].grad, mine(inward[1].grad.t(), grid).t()),
        "gradient of a weight out": (own_out.grad, mine(outward.grad, grid)),
    }
    return {name: apart(a, b) for name, (a, b) in pairs.items()}


def in_one_piece(self: Slices, x: Tensor, number: int) -> Tensor:
    return x.chunk(self.number)[number]


def sliced_in_one_piece(rank: int) -> dict[str, float]:
    grid, own = make_grid(2, 4, Groups(), rank), Slices.rows
    Slices.rows = in_one_piece
    try:
        return differences(grid, 2)
    finally:
        Slices.rows = own


def test_slices_that_are_not_in_blocks_are_found() -> None:
    """The comparison's own control: a slice of mesh rows is one piece, not every second block."""
    every = spawn(8, sliced_in_one_piece)
    wrong = {name for found in every for name, value in found.items() if value > 0.1}
    assert wrong >= {"into a block", "out of a block", "gradient of the input"}


def test_slices_that_do_not_divide_name_the_next_that_do() -> None:
    with pytest.raises(ValueError, match="5 slices do not divide 24 and 12; 6 do"):
        Slices.of(24, 12, 5)
    with pytest.raises(ValueError, match="24 slices do not divide 24 and 12; 12 do"):
        Slices.of(24, 12, 24)


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [(4, [(1, 4), (4, 1), (2, 2)]), (6, [(2, 3), (3, 2)]), (8, [(2, 4), (4, 2)])],
    ids=["4", "6", "8"],
)
def test_products_on_a_mesh_are_dense_products(ranks: int, meshes: list[tuple[int, int]]) -> None:
    for found in spawn(ranks, off, meshes):
        assert {key[:2] for key in found} == set(meshes)
        assert max(key[2] for key in found) >= 6
        assert not {key: value for key, value in found.items() if not value < 1e-12}


@pytest.mark.parametrize("trains", [False, True])
def test_only_weights_that_train_keep_what_they_took(trains: bool) -> None:
    alone = Group(None, (0,), 0, Books())
    grid, algorithm, kept = Grid(alone, alone), MeshSlice(1, (1, 1), (2,) * 4), []
    x = torch.ones(5, HIDDEN, requires_grad=True)
    weights = [torch.ones(8, HIDDEN, requires_grad=trains) for _ in range(2)]
    outward = torch.ones(HIDDEN, 8, requires_grad=trains)

    def pack(saved: Tensor) -> Tensor:
        kept.append(tuple(saved.shape))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        made, _ = algorithm.inward(x, weights, grid, 0)
        end = algorithm.outward(made, outward, grid, 1)
    end.sum().backward()
    assert ((5, HIDDEN) in kept, (5, 8) in kept) == (trains, trains)
    assert x.grad is not None and float(x.grad[0, 0]) == 8 * HIDDEN
    assert (outward.grad is not None) == trains
