"""Parameters of every kind of split, and the layouts between which they move on four ranks."""

from __future__ import annotations

import random

from uspft.layout import Layout
from uspft.parameters.shards import MatrixSplit, Shards

SHAPES = {
    "norm": (6,),
    "up": (8, 4),
    "down": (4, 8),
    "fused": (16, 4),
    "shared": (8, 4),
    "odd": (7, 4),
    "scale": (),
}
SPLITS = {
    "up": MatrixSplit(0, (8,)),
    "down": MatrixSplit(1, (8,)),
    "fused": MatrixSplit(0, (8, 4, 4), (4, 4, 4)),
    "shared": MatrixSplit(0, (8,), (2,)),
    "odd": MatrixSplit(0, (7,)),
}
ROWS = {
    "up": MatrixSplit(1, (4,), in_order=True),
    "down": MatrixSplit(0, (4,), in_order=True),
    "fused": MatrixSplit(1, (4,), in_order=True),
}
LAYOUTS = {
    "data 4": Layout(data=4),
    "tensor 2": Layout(mesh_columns=2, ring=2),
    "tensor 4": Layout(mesh_columns=4),
    "mesh 2x2": Layout(mesh_columns=2, ring=2, mesh_rows=2),
    "mesh 4x1": Layout(ring=4, mesh_rows=4),
}


def shards(layout: Layout) -> Shards:
    return mesh_shards(layout) if layout.is_mesh else Shards(layout, SPLITS)


def mesh_shards(layout: Layout) -> Shards:
    return Shards(layout, SPLITS, ROWS)


def some_shapes(dice: random.Random) -> dict[str, tuple[int, ...]]:
    return {f"p{n}": tuple(dice.randint(1, 5) for _ in range(dice.randint(0, 3))) for n in range(4)}
