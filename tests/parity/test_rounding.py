"""Splitting a row costs no precision: float32 to 5e-6, bfloat16 within 2 × one process's error.

Every way on 4 ranks (`--full`: 8 too), pairwise with heads, rows and windows; rows longer than
tiles on 2.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.attention import (
    Bench,
    Case,
    Layer,
    busiest,
    dense,
    make_inputs,
    shared,
    ways,
)
from tests.support.pairwise import pairwise
from tests.support.ranks import each_once, spawn
from uspft.segments import Segments
from uspft.sequence import Cost, Heads

LENGTH, DIM = 256, 32
DTYPES = (torch.float32, torch.bfloat16)
SCALE = DIM**-0.5
HEADS = {
    "mha": Heads(4, 4, DIM),
    "gqa": Heads(8, 2, DIM),
    "mqa": Heads(6, 1, DIM),
    "6/2": Heads(6, 2, DIM),
    "9/3": Heads(9, 3, DIM),
    "28/4": Heads(28, 4, DIM),
}
ROWS = {
    "one document": [Segments.single(LENGTH)],
    "packed regular": [Segments(tuple(range(0, LENGTH + 1, 64)), LENGTH)],
    "packed odd": [Segments((0, 117, 130, 131, 250), LENGTH)],
}
WINDOWS = (None, 40)
LONG = [Segments((0, 1060, 1100), 1104)]
"""Longer than the kernel's tiles on each of two ranks."""


def cases(world: int) -> list[Case]:
    return [Case(*one) for one in pairwise(ways(world), HEADS, ROWS, WINDOWS)]


def rounded(heads: str, dtype: torch.dtype, layer: Layer) -> list[Tensor]:
    tokens = sum(row.length for row in layer.rows)
    return [x.to(dtype) for x in make_inputs(HEADS[heads], tokens)]


def errors(layer: Layer, heads: str, index: Tensor, truth: dict[Any, list[Tensor]]) -> Any:
    """By type: (largest error, sum of its squares) of out, dq, dk, dv on these tokens; under
    "sent", by type, what this rank sent."""
    found: dict[Any, Any] = {"sent": {}}
    for dtype, want in truth.items():
        got = shared(rounded(heads, dtype, layer), layer, index, SCALE)
        off = [g.double() - w[index] for g, w in zip(got, want, strict=True)]
        found[dtype] = [(float(x.abs().max()), float(x.square().sum())) for x in off]
        found["sent"][dtype] = layer.bench.sent()
    return found


def cost(case: Case, dtype: torch.dtype) -> Cost:
    """What the algorithm says that its busiest rank sends: everything in the compute type."""
    bench = Bench.of(case.way, case.window)
    (row,) = ROWS[case.rows]
    return bench.algorithm.cost(row, HEADS[case.heads], dtype.itemsize, case.window)


def true(
    layer: Layer, heads: str, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> dict[Any, list[Tensor]]:
    """By type of the inputs: out, dq, dk, dv."""
    return {dtype: dense(rounded(heads, dtype, layer), layer, SCALE) for dtype in dtypes}


def work(rank: int, world: int) -> dict[Case, Any]:
    layers = {
        case: Layer(Bench.of(case.way, case.window), ROWS[case.rows], case.window)
        for case in cases(world)
    }
    truth = each_once(
        {case[1:4]: partial(true, layer, case.heads) for case, layer in layers.items()}
    )
    found: dict[Case, Any] = {
        case: errors(layer, case.heads, layer.index(), truth[case[1:4]])
        for case, layer in layers.items()
    }
    for case, answer in found.items():
        answer["cost"] = {dtype: cost(case, dtype) for dtype in DTYPES}
    return found


def alone() -> dict[tuple[Any, ...], Any]:
    """The errors of one process, by heads, rows and window."""
    found = {}
    for key in product(HEADS, ROWS, WINDOWS):
        layer = Layer(Bench.alone(), ROWS[key[1]], key[2])
        found[key] = errors(layer, key[0], layer.index(), true(layer, key[0]))
    return found


@pytest.fixture(scope="module")
def single() -> Any:
    return alone()


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.full)])
def test_rounding(world: int, single: Any) -> None:
    answers = spawn(world, work, world)
    for case in cases(world):
        for number, what in enumerate(("out", "dq", "dk", "dv")):
            largest = max(answer[case][torch.float32][number][0] for answer in answers)
            assert largest <= 5e-6, f"{case}: {what} in float32 is off by {largest}"
            squares = sum(answer[case][torch.bfloat16][number][1] for answer in answers)
            best = single[case[1:4]][torch.bfloat16][number][1]
            ratio = (squares / best) ** 0.5
            assert ratio <= 2.0, f"{case}: {what} in bfloat16 is {ratio:.2f} × as far off"
            rough = max(answer[case][torch.bfloat16][number][0] for answer in answers)
            assert rough > 5e-5, f"{case}: {what} in bfloat16 would pass for float32"
        for dtype, said in answers[0][case]["cost"].items():
            books = [answer[case]["sent"][dtype] for answer in answers]
            assert busiest(books) == said, f"{case}: the books of {dtype}"


def long_work(rank: int) -> dict[str, float]:
    """By way: the largest error of this rank's out, dq, dk, dv in float32."""
    single = [way for way in ways(2) if way.name != "hybrid_cp"]
    layers = {str(way): Layer(Bench.of(way), LONG, None) for way in single}
    anyone = next(iter(layers.values()))
    truth = each_once({"": partial(true, anyone, "mha", (torch.float32,))})[""]
    return {
        name: max(off for off, _ in errors(layer, "mha", layer.index(), truth)[torch.float32])
        for name, layer in layers.items()
    }


def test_long_rows_in_float32() -> None:
    for answer in spawn(2, long_work):
        assert len(answer) > 3 and max(answer.values()) <= 5e-6, answer
