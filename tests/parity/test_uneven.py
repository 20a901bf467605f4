"""The seam lets ranks hold unequal numbers of tokens, none at all included."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.attention import (
    HEADS,
    Bench,
    Layer,
    Way,
    dense,
    make_inputs,
    make_sinks,
    shared,
)
from tests.support.ranks import spawn
from uspft.segments import Segments
from uspft.sequence.allgather import AllGather
from uspft.sequence.planned import Planned
from uspft.sequence.rows.spans import Span
from uspft.sequence.usp import Usp

SCALE, WINDOWS = 0.3, (None, 11)
ROW = Segments((0, 17, 40, 41, 90), 96)
ORDER: list[tuple[Span, ...]] = [
    (),
    ((20, 25), (50, 55)),
    ((0, 15), (80, 95)),
    ((15, 20), (25, 50), (55, 80), (95, 96)),
]


def uneven(algorithm: type[Any]) -> type[Any]:
    """The algorithm with tokens 0, 10, 30 and 56 of the row."""
    return type(f"Uneven{algorithm.__name__}", (algorithm,), {"token_order": lambda *_: ORDER})


ALGORITHMS = [
    uneven(Usp)(1, 4),
    uneven(AllGather)(4),
    uneven(Planned)(4, piece_tokens=5),
    uneven(Planned)(4, keep=False),
    uneven(Planned)(2, 2, piece_tokens=5),
    uneven(Usp)(2, 2),
    uneven(Usp)(4),
]


def compare(rank: int, world: int, order: int = 1) -> dict[str, list[float]]:
    """How far out, dq, dk, dv and dsinks are off, by algorithm and window; order −1: from the
    tokens in reverse."""
    inputs, sinks = make_inputs(HEADS["6/2"], ROW.length), make_sinks(HEADS["6/2"])
    found = {}
    for algorithm in ALGORITHMS:
        bench = Bench.of(Way("ring_cp", algorithm.ulysses, algorithm.ring))
        bench.algorithm = algorithm
        for window in WINDOWS:
            layer = Layer(bench, [ROW], window)
            assert [sum(b - a for a, b in runs) for runs in layer.orders[0]] == [0, 10, 30, 56]
            index = layer.index() if order > 0 else layer.index().flip(0)
            want = dense(inputs, layer, SCALE, sinks)
            *got, dsinks = shared(inputs, layer, index, SCALE, sinks=sinks)
            dist.all_reduce(dsinks)
            pairs = [(g, w[index]) for g, w in zip(got, want[:4], strict=True)]
            found[f"{algorithm} {window}"] = [
                float((g - w).abs().max()) if g.numel() else 0.0
                for g, w in [*pairs, (dsinks, want[4])]
            ]
    return found


@pytest.mark.parametrize("world", [4])
def test_every_algorithm_takes_unequal_numbers_of_tokens(world: int) -> None:
    for answer in spawn(world, compare, world):
        assert len(answer) == len(ALGORITHMS) * len(WINDOWS)
        for case, off in answer.items():
            assert max(off) < 1e-10, f"{case}: off by {off}"


def test_tokens_in_reverse_are_seen() -> None:
    for answer in spawn(4, compare, 4, -1)[1:]:  # the first rank has none
        assert all(max(off) > 1e-3 for off in answer.values()), answer
