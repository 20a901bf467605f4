"""Cannon on a square mesh: what travels is skewed, and each round multiplies blocks and passes them
on by one rank; where the output travels, it is put straight at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.tensor import Grid

KIND = "tensor"


def output_stationary(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    row, column, ranks = _square(grid)
    a, b = passed(a, -row, grid.columns), passed(b, -column, grid.rows)
    out = a.new_zeros(len(a), b.shape[1])
    for number in range(ranks):
        out.addmm_(a, b)
        if number + 1 < ranks:
            a, b = passed(a, -1, grid.columns), passed(b, -1, grid.rows)
    return out


def left_stationary(a: Tensor, w: Tensor, grid: Grid) -> Tensor:
    """In round t the rank of mesh row i and mesh column c has rows i + c + t of w, and adds to what
    mesh column i + c + t will hold."""
    row, column, ranks = _square(grid)
    w = passed(w, -column, grid.rows)
    out = a.new_zeros(len(a), len(w))
    for number in range(ranks):
        out.addmm_(a, w.t())
        if number + 1 < ranks:
            w, out = passed(w, -1, grid.rows), passed(out, -1, grid.columns)
    return passed(out, row - 1, grid.columns)


def right_stationary(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    """In round t the rank of mesh row r and mesh column j has columns r + j + t of a, and adds to
    what mesh row r + j + t will hold."""
    row, column, ranks = _square(grid)
    a = passed(a, -row, grid.columns)
    out = a.new_zeros(a.shape[1], b.shape[1])
    for number in range(ranks):
        out.addmm_(a.t(), b)
        if number + 1 < ranks:
            a, out = passed(a, -1, grid.columns), passed(out, -1, grid.rows)
    return passed(out, column - 1, grid.rows)


FLOWS: Any = {"output": output_stationary, "left": left_stationary, "right": right_stationary}


def passed(x: Tensor, offset: int, group: Group) -> Tensor:
    """This returns what the rank as many places before this one has passed on."""
    if offset % group.size == 0:
        return x
    x = x.contiguous()
    coming = torch.empty_like(x)
    (wait,) = shift([Move(x, coming, offset)], group, KIND)
    wait()
    return coming


def _square(grid: Grid) -> tuple[int, int, int]:
    rows, columns = grid.rows, grid.columns
    if rows.size != columns.size:
        raise ValueError(f"Cannon needs a square mesh, not {rows.size} × {columns.size}")
    return rows.index, columns.index, rows.size
