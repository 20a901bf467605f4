"""The gradients of a step at any ZeRO stage, and how two sets of them differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from uspft.engine.state import GRADIENT, on_first_rank
from uspft.verify.work import Difference, group_of

if TYPE_CHECKING:
    from uspft.engine.step import Engine

FLOOR = 1e-3
See = Callable[[str, Tensor], None]
"""A function that is called with each parameter's name and gradient."""


def show_gradients(engine: Engine, see: See) -> None:
    """Call `see` on rank 0 with every gradient of a step, whole and before clipping; collective,
    within an engine's step."""
    trained = list(engine.trained())
    with on_first_rank(engine, trained, GRADIENT) as read:
        if read:
            for name in trained:
                see(name, read(name))


class GradientWriter:
    """A writer of gradients to a file one by one, in float32, with an index of their names."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._places: dict[str, tuple[int, int]] = {}
        self._count = 0

    def add(self, name: str, gradient: Tensor) -> None:
        values = gradient.detach().float().cpu().contiguous().numpy()
        values.tofile(self._file)
        self._places[name] = (self._count, values.size)
        self._count += values.size

    def close(self) -> None:
        self._file.close()
        self._path.with_suffix(".json").write_text(json.dumps(self._places))


class GradientFile:
    """The gradients that a GradientWriter wrote, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._places = json.loads(path.with_suffix(".json").read_text())
        self._values = np.memmap(path, np.float32, mode="r")

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def read(self, name: str) -> Tensor:
        """Return one gradient, flat. Raises KeyError for an unknown name."""
        first, count = self._places[name]
        return torch.from_numpy(np.array(self._values[first : first + count]))


class Comparison:
    """A comparison of gradients, one by one, with those of a file.

    A parameter's relative difference is ‖g − g₀‖ ÷ max(‖g₀‖, FLOOR · ‖G₀‖ · √(n/N)), in 2-norms: g
    is its gradient of n elements, g₀ that of the file, and G₀ the file's whole gradient of N
    elements. The floor is a thousandth of what the norm of g₀ would be if G₀ were spread evenly;
    smaller gradients are dominated by rounding.
    """

    def __init__(self, reference: GradientFile) -> None:
        self._reference = reference
        self._seen: dict[str, tuple[float, float, int]] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        want = self._reference.read(name)
        off = gradient.detach().float().cpu().flatten() - want
        norms = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (off, want))
        self._seen[name] = (*norms, want.numel())  # type: ignore[assignment]

    def groups(self) -> dict[str, Difference]:
        """Return the largest difference of each group; it is infinite where a gradient is not
        finite or is missing."""
        whole = math.sqrt(sum(norm**2 for _, norm, _ in self._seen.values()))
        count = sum(n for _, _, n in self._seen.values())
        found: dict[str, Difference] = {}
        for name, (off, norm, n) in self._seen.items():
            least = max(norm, FLOOR * whole * math.sqrt(n / count))
            value = off / least if least else (math.inf if off else 0.0)
            _keep(found, name, value if math.isfinite(value) else math.inf)
        for name in self._reference.names - self._seen.keys():
            _keep(found, name, math.inf)
        return found


def _keep(found: dict[str, Difference], name: str, value: float) -> None:
    group = group_of(name)
    if group not in found or value > found[group].value:
        found[group] = Difference(value, name)
