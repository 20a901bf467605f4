"""The layouts that `plan` sets beside a recipe's own.

They are tensor 1, 2, 4, 8 and every split of what is left of the ranks into context and data, each
with the algorithm, and for MeshSlice's recipes the mesh, that is predicted to be fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from uspft.config.algorithms import CONTEXT, WHOLE, AlgorithmRow, Splits
from uspft.families import FAMILIES, ModelShape
from uspft.layout import Layout, ring_ranks_of_a_host
from uspft.planner.machine import Hardware
from uspft.planner.mesh_tuner import tune
from uspft.planner.step import local_heads, model_flops, step_time
from uspft.planner.step_shape import StepShape, StepTime
from uspft.sequence import Algorithm, make_algorithm
from uspft.tensor.parts import divide_heads

TENSOR = (1, 2, 4, 8)
"""Tensor degrees that are looked at."""


@dataclass(frozen=True)
class Prediction:
    """A layout with its algorithm, and what a step takes under it."""

    layout: Layout
    row: AlgorithmRow
    time: StepTime
    sliced: bool = False
    """Whether matrices are multiplied in MeshSlice's way, also on a single mesh row."""

    @property
    def name(self) -> str:
        name, columns = self.layout.name(self.row.name), self.layout.mesh_columns
        flat = self.sliced and self.layout.mesh_rows == 1
        return name.replace(f"tensor{columns}", f"mesh1x{columns}") if flat else name

    def tokens_per_second_per_rank(self, step: StepShape) -> float:
        """Return tokens per second and rank; padding is counted, and a row is counted once."""
        return step.step_rows * step.row.length / (self.time.seconds * self.layout.ranks)

    def mfu(self, step: StepShape, hardware: Hardware) -> float | None:
        """Return the MFU of metrics.jsonl, or None where no maker says what the peak is."""
        if hardware.device is None:
            return None
        return model_flops(step) / (self.time.seconds * hardware.peak * self.layout.ranks)


def splits_over(model: ModelShape, tensor: int) -> bool:
    """Tell whether so many ranks can hold parts of the model's matrices; no experts are split."""
    family = FAMILIES[model.model_type]
    if family.routed:
        return tensor == 1
    return divide_heads(model.heads, model.kv_heads, tensor)


def alternatives(step: StepShape, ranks: int, hardware: Hardware) -> list[Prediction]:
    """Return the predictions for every tensor and context degree, the fastest layout first.

    A degree must be legal for the model and the rows; of its algorithms the fastest counts, and
    where the step has MeshSlice's slices, beside Megatron's way the fastest mesh.
    """
    found = []
    for tensor in TENSOR:
        for context in _divisors(ranks // tensor) if ranks % tensor == 0 else ():
            data = ranks // (tensor * context)
            ways = []
            if splits_over(step.model, tensor):
                plain = replace(step, slices=None)
                ways.append(list(_predictions(plain, (tensor, 1, context, data), hardware)))
            if step.slices is not None and tensor > 1:
                meshes = tune(step, (tensor, context, data), hardware).tried
                ways.append(
                    [
                        prediction
                        for mesh in meshes
                        for prediction in _predictions(
                            replace(step, slices=mesh.slices),
                            (mesh.layout.mesh_columns, mesh.layout.mesh_rows, context, data),
                            hardware,
                        )
                    ]
                )
            found += [min(each, key=lambda one: one.time.seconds) for each in ways if each]
    return sorted(found, key=lambda one: one.time.seconds)


def _predictions(
    step: StepShape, degrees: tuple[int, int, int, int], hardware: Hardware
) -> Iterator[Prediction]:
    for row, layout, algorithm in ways_to_share(step, degrees, hardware):
        time = step_time(step, layout, algorithm, hardware)
        yield Prediction(layout, row, time, step.slices is not None)


def ways_to_share(
    step: StepShape, degrees: tuple[int, int, int, int], hardware: Hardware
) -> Iterator[tuple[AlgorithmRow, Layout, Algorithm]]:
    """Yield the algorithms that `auto` may choose for the step's row, at every Ulysses degree.

    degrees: mesh columns, mesh rows, context_parallel and data.
    """
    columns, rows, context, data = degrees
    sharing = rows * context
    if sharing == 1:
        yield WHOLE, Layout(columns, data=data), make_algorithm(WHOLE, 1, 1)
        return
    heads = local_heads(step.model, columns)
    window = step.windows[0] if len(set(step.windows)) == 1 else None
    for row in CONTEXT.values():
        for ulysses in _divisors(sharing) if row.automatic else ():
            ring = sharing // ulysses
            whole = row.splits is Splits.HEADS
            if whole != (ring == 1) or heads.query < ulysses:
                continue
            layout = Layout(columns, ulysses, ring, data, mesh_rows=rows)
            per_host = ring_ranks_of_a_host(hardware.ranks_per_host, layout)
            algorithm = make_algorithm(
                row, ulysses, ring, keep=not step.recompute, window=window, per_host=per_host
            )
            if not algorithm.problems(step.row.length, heads):
                yield row, layout, algorithm


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
