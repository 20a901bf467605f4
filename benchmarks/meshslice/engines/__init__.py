"""Ways to multiply matrices on a mesh, each with the three flows of MeshSlice's.

A matrix [X, Y] on the mesh has X over mesh rows and Y over mesh columns: a rank has [X/R, Y/C].
`output` makes a · b of a [m, k/C] and b [k/R, n/C]; `left` makes a · wᵀ of a [m, k/C] and
w [n/R, k/C]; `right` makes aᵀ · b of a [k, m/C] and b [k, n/C]. All return this rank's part.
Dimensions divide: by the ranks along them, by SUMMA's panels, by the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from benchmarks.meshslice.engines import cannon, summa, wang
from uspft.planner.mesh import Flow
from uspft.tensor import Grid, flows

Flows = Mapping[Flow, Callable[[Tensor, Tensor, Grid], Tensor]]


def in_slices(slices: int) -> Flows:
    """This returns MeshSlice's flows; one slice is Collective."""
    return {
        "output": partial(flows.output_stationary, slices=slices),
        "left": partial(flows.left_stationary, slices=slices),
        "right": partial(flows.right_stationary, slices=slices),
    }


def engines(grid: Grid) -> dict[str, Flows]:
    """This returns the baselines that a mesh allows, by name.

    SUMMA stands there with as few panels as it can have and with twice as many; one dimension is
    Wang on a single mesh row or column.
    """
    flat = 1 in (grid.rows.size, grid.columns.size)
    found = {
        "Collective": in_slices(1),
        "SUMMA": summa.flows(1),
        "SUMMA, twice the panels": summa.flows(2),
    }
    for axis in ("columns", "rows"):
        if not flat:
            found[f"Wang, {axis} hidden"] = wang.flows(axis)
        elif getattr(grid, axis).size > 1:
            found["1-D"] = wang.flows(axis)
    if grid.rows.size == grid.columns.size:
        found["Cannon"] = cannon.FLOWS
    return found
