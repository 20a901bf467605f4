"""Every way to multiply on a mesh against dense products in float64, in its three flows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.meshslice.engines import engines, in_slices
from benchmarks.meshslice.engines.cannon import FLOWS as CANNON
from benchmarks.meshslice.engines.summa import flows as summa_flows
from tests.support.ranks import spawn
from uspft.comm import Books, Group
from uspft.layout import Layout
from uspft.mesh import Groups

M, K, N = 48, 96, 144
MESHES = {4: [(1, 4), (4, 1), (2, 2)], 6: [(2, 3), (3, 2)], 8: [(2, 4), (4, 2)]}
EVERYWHERE = {"Collective", "SUMMA", "SUMMA, twice the panels"}
WANG = {"Wang, rows hidden", "Wang, columns hidden"}
SHAPES = {"output": ((M, K), (K, N)), "left": ((M, K), (N, K)), "right": ((K, M), (K, N))}


class Grid(NamedTuple):
    rows: Group
    columns: Group


def make_grid(rows: int, columns: int, groups: Groups, rank: int) -> Grid:
    layout, books = Layout(columns, ring=rows, mesh_rows=rows), Books()
    ways = "mesh_rows", "mesh_columns"
    return Grid(*(groups.of(layout.groups([way]), rank, books) for way in ways))


def mine(x: Tensor, grid: Grid) -> Tensor:
    part = x.chunk(grid.rows.size)[grid.rows.index]
    return part.chunk(grid.columns.size, 1)[grid.columns.index].contiguous()


def dense(flow: str, a: Tensor, b: Tensor) -> Tensor:
    return (a.t() if flow == "right" else a) @ (b.t() if flow == "left" else b)


def differences(grid: Grid, made_of: Any, *, spoiled: bool = False) -> dict[str, float]:
    """The largest difference of each flow; spoiled: one rank has another part than it should."""
    found = {}
    for flow, shapes in SHAPES.items():
        draw = torch.Generator().manual_seed(1)
        a, b = (torch.randn(size, dtype=torch.float64, generator=draw) for size in shapes)
        left, right = mine(a, grid), mine(b, grid)
        if spoiled and grid.rows.index == grid.columns.index == 0:
            right = right.flip(0)
        made, want = made_of[flow](left, right, grid), mine(dense(flow, a, b), grid)
        assert made.shape == want.shape and made.dtype == torch.float64
        found[flow] = float((made - want).abs().max())
    return found


def off(rank: int, meshes: list[tuple[int, int]], spoiled: bool) -> dict[Any, float]:
    groups, found = Groups(), {}
    for mesh in meshes:
        grid = make_grid(*mesh, groups, rank)
        every = {**engines(grid), "MeshSlice, 4": in_slices(4)}
        for name, made_of in every.items():
            for flow, value in differences(grid, made_of, spoiled=spoiled).items():
                found[mesh, name, flow] = value
    return found


def expected(mesh: tuple[int, int]) -> set[str]:
    own = {"1-D"} if 1 in mesh else WANG
    return EVERYWHERE | own | ({"Cannon"} if mesh[0] == mesh[1] else set()) | {"MeshSlice, 4"}


@pytest.mark.parametrize("ranks", MESHES)
def test_every_flow_is_the_dense_product(ranks: int) -> None:
    for found in spawn(ranks, off, MESHES[ranks], False):
        names = {mesh: {key[1] for key in found if key[0] == mesh} for mesh in MESHES[ranks]}
        assert names == {mesh: expected(mesh) for mesh in MESHES[ranks]}
        assert {key[2] for key in found} == set(SHAPES)
        assert not {key: value for key, value in found.items() if not value < 1e-12}


def test_a_rank_with_a_wrong_part_is_seen() -> None:
    """In every flow of every way, by the largest difference on any rank."""
    answers = spawn(4, off, [(2, 2)], True)
    worst = {key: max(found[key] for found in answers) for key in answers[0]}
    assert len(worst) == 3 * len(expected((2, 2)))
    assert not {key: value for key, value in worst.items() if not value > 1e-3}


def test_what_does_not_divide_is_refused() -> None:
    def grid(rows: int, columns: int) -> Any:
        return Grid(*(Group(None, tuple(range(size))) for size in (rows, columns)))

    a, b = torch.zeros(4, 10), torch.zeros(10, 4)
    for flow in SHAPES:
        with pytest.raises(ValueError, match="needs a square mesh, not 2 × 3"):
            CANNON[flow](a, b, grid(2, 3))
    with pytest.raises(ValueError, match="4 panels do not divide 10"):
        summa_flows(4)["output"](a, b, grid(1, 1))
    assert "Cannon" not in engines(grid(2, 3)) and "Cannon" in engines(grid(2, 2))
