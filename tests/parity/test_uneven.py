"""The seam lets ranks hold unequal numbers of tokens, none at all included."""

from __future__ import annotations

from dataclasses import dataclass

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
from uspft.batch import Segments
from uspft.sequence.allgather import AllGather
from uspft.sequence.planned import Planned
from uspft.sequence.regions import Run
from uspft.sequence.ring import Ring
from uspft.sequence.ulysses import Ulysses
from uspft.sequence.usp import Usp

SCALE, WINDOWS = 0.3, (None, 11)
ROW = Segments((0, 17, 40, 41, 90), 96)
ORDER: list[tuple[Run, ...]] = [
    (),
    ((20, 25), (50, 55)),
    ((0, 15), (80, 95)),
    ((15, 20), (25, 50), (55, 80), (95, 96)),
]


class Uneven:
    """Tokens 0, 10, 30 and 56 of the row."""

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        assert segments == ROW
        return ORDER


@dataclass(frozen=True)
class UnevenRing(Uneven, Ring):
    pass


@dataclass(frozen=True)
class UnevenGather(Uneven, AllGather):
    pass


@dataclass(frozen=True)
class UnevenPlanned(Uneven, Planned):
    pass


@dataclass(frozen=True)
class UnevenUsp(Uneven, Usp):
    pass


@dataclass(frozen=True)
class UnevenUlysses(Uneven, Ulysses):
    pass


ALGORITHMS = [
    UnevenRing(4),
    UnevenGather(4),
    UnevenPlanned(4, piece_tokens=5),
    UnevenPlanned(4, keep=False),
    UnevenPlanned(2, 2, piece_tokens=5),
    UnevenUsp(2, 2),
    UnevenUlysses(4),
]


def compare(rank: int, world: int) -> dict[str, list[float]]:
    """How far out, dq, dk, dv and dsinks are off, by algorithm and window."""
    inputs, sinks = make_inputs(HEADS["6/2"], ROW.length), make_sinks(HEADS["6/2"])
    found = {}
    for algorithm in ALGORITHMS:
        bench = Bench.of(Way("ring_cp", algorithm.ulysses, algorithm.ring))
        bench.algorithm = algorithm
        for window in WINDOWS:
            layer = Layer(bench, [ROW], window)
            index = layer.index()
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
