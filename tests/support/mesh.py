"""Runs whose matrices lie on a mesh: which there are. Their recipes are those of support/tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.support.pairwise import pairwise
from tests.support.tensor import MODELS, Case

MESHES = ((2, 2), (1, 4), (4, 1))
STAGES = ("zero1", "zero2", "zero3 whole")
SLICED = {"llama": 2, "qwen2": [1, 2, 4, 8], "qwen3": 4, "mistral": 1, "phi3": [8, 1, 2, 1]}
"""Slices of each product of 64 features; the other models leave them to the autotuner."""
ALGORITHMS = (None, "ring_cp", "ulysses_cp", "allgather_cp")


STATEFUL = ("qwen3_5_text", "olmo_hybrid")
NOT_ON_MESHES = (*STATEFUL, "gemma4_text")
ON_MESHES = {name: one for name, one in MODELS.items() if one["kind"] not in NOT_ON_MESHES}
"""Those that meshes split: layers with a state, and with heads of two sizes, they do not."""


def on_mesh(rows: int, columns: int) -> dict[str, Any]:
    """A `parallel_config` of a mesh, with two slices of every product."""
    mesh = {"model_parallel": rows * columns, "tensor_mesh": [rows, columns]}
    return {"tensor_parallel_algo": "meshslice", **mesh, "tensor_slices": 2}


@dataclass(frozen=True)
class MeshCase(Case):
    """One run. layout: context and data degrees."""

    mesh: tuple[int, int] = (1, 1)

    @property
    def parallel(self) -> dict[str, Any]:
        rows, columns = self.mesh
        context, _ = self.layout
        found = on_mesh(rows, columns) | {"context_parallel": context}
        found["tensor_slices"] = SLICED.get(self.model, "auto")
        turn = ALGORITHMS[(list(ON_MESHES).index(self.model) + rows + context) % len(ALGORITHMS)]
        if turn and rows * context > 1:
            found["context_parallel_algo"] = turn
        return found


def layouts(ranks: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Meshes with context and data degrees that fill so many ranks."""
    degrees = [*product(MESHES, product((1, 2), (1, 2))), ((2, 1), (2, 2)), ((1, 2), (2, 2))]
    return [(m, d) for m, d in degrees if m[0] * m[1] * d[0] * d[1] == ranks]


def cases(ranks: int, *, full: bool = False) -> list[MeshCase]:
    """On four ranks every pair of layout, stage and packing, on eight every second layout, models
    by turns; full: every pair of all with the model too, and all of LLaMA's."""

    def one_of(model: str, layout: Any, zero: str, packed: bool) -> MeshCase:
        return MeshCase(model, layout[1], zero, packed, False, layout[0])

    factors = layouts(ranks), STAGES, (False, True)
    if full:
        found = [one_of(*case) for case in pairwise(tuple(ON_MESHES), *factors)]
        return list(dict.fromkeys([*found, *_all_of("llama", factors, one_of)]))
    models, found = list(ON_MESHES), pairwise(*factors)
    if ranks == 8:
        every_second = [one for n, one in enumerate(layouts(ranks)) if n % 4 in (0, 3)]
        found = [(one, STAGES[n % 3], n % 2 > 0) for n, one in enumerate(every_second)]
        models = [*models[7:], *models[:7]]
    return [one_of(models[n % len(models)], *case) for n, case in enumerate(found)]


def _all_of(model: str, factors: Any, every: Any) -> Iterator[MeshCase]:
    return (every(model, *case) for case in product(*factors))
