"""Embeddings and heads with more rows than the model's files: new tokens start as the mean."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.parameters.names import plain_name
from uspft.parameters.part import Part

if TYPE_CHECKING:
    from uspft.parameters.source import FolderWeights
    from uspft.tensor.parts import Range

_ROWS = 4096
"""How many rows are in memory at one time for the mean."""


def table_names(model: Any) -> set[str]:
    """Return the names in files of a model's embedding and head, whose rows are tokens."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(module.weight) for module in modules if module is not None}
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, value in named if id(value) in tables}


class GrownWeights:
    """The weights of a folder, with its tables grown to the rows that the model has.

    Each new row is the mean of the table's rows in the folder, as transformers starts new tokens
    without noise (Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """

    def __init__(self, base: FolderWeights, tables: Collection[str]) -> None:
        shapes = base.shapes()
        self._base = base
        self._tables = {name: shapes[name] for name in tables if name in shapes}

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        stored = self._tables.get(name)
        grows = stored and stored[0] < part.shape[0] and stored[1:] == part.shape[1:]
        if not (stored and grows):
            return self._base.read(name, part)
        rows, columns = stored[0], part.ranges[1:]

        def held(ranges: tuple[Range, ...]) -> Tensor:
            return self._base.read(name, Part(stored, (ranges, *columns)))

        start: Tensor | None = None
        pieces = []
        for first, stop in part.ranges[0]:
            if first < rows:
                pieces.append(held(((first, min(stop, rows)),)))
            if stop > rows:
                start = _mean(held, rows) if start is None else start
                pieces.append(start.expand(stop - max(first, rows), -1))
        dtype = held(((0, 1),)).dtype
        return torch.cat([piece.to(dtype) for piece in pieces])


def _mean(held: Any, rows: int) -> Tensor:
    """Return the mean of all rows, [1, columns] in float64."""
    total = 0.0
    for first in range(0, rows, _ROWS):
        total = total + held(((first, min(first + _ROWS, rows)),)).double().sum(0, keepdim=True)
    assert isinstance(total, Tensor)
    return total / rows
