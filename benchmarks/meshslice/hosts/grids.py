"""The meshes that ranks multiply on."""

from __future__ import annotations

from uspft.comm import Books
from uspft.layout import Layout
from uspft.mesh import Groups, Mesh, make_mesh


def layout_on(mesh: tuple[int, int]) -> Layout:
    """This returns the layout of so many mesh rows and columns, matrices in blocks over both."""
    rows, columns = mesh
    return Layout(columns, ring=rows, mesh_rows=rows, blocks=True)


def grid_of(mesh: tuple[int, int], groups: Groups) -> Mesh:
    """This makes a mesh of all ranks; collective."""
    return make_mesh(layout_on(mesh), groups, Books())
