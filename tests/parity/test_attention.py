"""Every algorithm against dense float64 attention in one process: out, dq, dk, dv, dsinks.

On 2 ranks every way with all rows and windows, heads by turns, and pairwise with sinks; pairwise,
with sinks and layers that are recomputed, on 1, 3 and 4, on 8 every second of these; `--full`: the
whole product, recomputed too, on 1 to 8.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations, cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.algorithms import ALGORITHMS
from tests.support.attention import (
    DIM,
    HEADS,
    WINDOWS,
    Bench,
    Case,
    Layer,
    busiest,
    dense,
    leaks,
    make_inputs,
    make_sinks,
    rows_of,
    shared,
    ways,
)
from tests.support.pairwise import pairwise
from tests.support.ranks import each_once, spawn
from tests.support.varlen import varlen_on_cpu
from uspft.kernels.plain import TorchCapped
from uspft.model.recompute import Recompute
from uspft.segments import Segments
from uspft.sequence import FORWARDS

SCALE = DIM**-0.5
AGAIN: tuple[Recompute | None, ...] = (None, "nothing", "exchange", "attention")
"""What of attention is made again by a layer that is recomputed; None: it is not recomputed."""


def whole_product(world: int) -> list[Case]:
    """With these ranks, recomputed and not."""
    found = product(ways(world), HEADS, rows_of(world), WINDOWS, AGAIN)
    return [Case(*one) for one in found]


def pairs(world: int, sinks: tuple[bool, ...] = (False, True)) -> list[Case]:
    """With these ranks, recomputed and not."""
    factors = ways(world), HEADS, rows_of(world), WINDOWS, AGAIN, sinks
    return [Case(*one) for one in pairwise(*factors)]


def sinks(case: Case) -> torch.Tensor | None:
    return make_sinks(HEADS[case.heads]) if case.sinks else None


def compare(rank: int, cases: list[Case], world: int, break_order: bool) -> dict[Case, Any]:
    """By case: the largest errors of (out, dq, dk, dv) on this rank's tokens, and of dsinks where
    there are any, and its books."""
    benches = {
        # Layers may have other windows than the one that tokens are ordered for.
        (way, w): Bench.of(way, None if w == 11 else w)
        for way, w in product(ways(world), WINDOWS)
    }
    layers = {
        case: Layer(benches[case.way, case.window], rows_of(world)[case.rows], case.window)
        for case in cases
    }
    inputs = {
        (heads, rows): make_inputs(HEADS[heads], sum(row.length for row in rows_of(world)[rows]))
        for heads, rows in {case[1:3] for case in cases}
    }
    truth = each_once(
        {
            case.question: partial(dense, inputs[case[1:3]], layer, SCALE, sinks(case))
            for case, layer in layers.items()
        }
    )
    found = {}
    for case, layer in layers.items():
        bench, want = layer.bench, truth[case.question]
        here = bench.mesh.context.index
        index = layer.index(world - 1 - here if break_order else here)
        again = {"sinks": sinks(case), "again": case.again}
        got = shared(inputs[case[1:3]], layer, index, SCALE, **again)
        tokens = zip(got[:4], want[:4], strict=True)
        off = [float((g - w[index]).abs().max()) for g, w in tokens]
        for part, whole in zip(got[4:], want[4:], strict=True):
            if world > 1:
                dist.all_reduce(part)
            off.append(float((part - whole).abs().max()))
        sent = bench.sent()
        cost = (
            bench.algorithm.cost(
                layer.rows[0], HEADS[case.heads], 8, case.window, FORWARDS[case.again or "nothing"]
            )
            if len(layer.rows) == 1
            else None
        )
        found[case] = off, sent, cost
    return found


def check(answers: list[dict[Case, Any]], cases: list[Case]) -> None:
    assert all(answer.keys() == set(cases) for answer in answers)
    for case in cases:
        for off, _, _ in (answer[case] for answer in answers):
            assert max(off) < 1e-10, f"{case}: out, dq, dk, dv, dsinks off by {off}"
        cost = answers[0][case][2]
        if cost:
            assert busiest([answer[case][1] for answer in answers]) == cost, f"{case}: the books"


def by_turns(world: int) -> list[Case]:
    """Every way with all rows and windows; heads take turns."""
    found = zip(cycle(HEADS), product(ways(world), rows_of(world), WINDOWS), strict=False)
    return [Case(way, heads, rows, window) for heads, (way, rows, window) in found]


@pytest.fixture(scope="module")
def on_two() -> list[dict[Case, Any]]:
    return spawn(2, compare, by_turns(2) + pairs(2, sinks=(True,)), 2, False)


def test_one_rank_equals_dense_attention() -> None:
    check(spawn(1, compare, pairs(1), 1, False), pairs(1))


def test_every_algorithm_equals_dense_attention(on_two: list[dict[Case, Any]]) -> None:
    check(on_two, by_turns(2) + pairs(2, sinks=(True,)))
    factors = ways(2), HEADS, rows_of(2), WINDOWS
    for one, other in combinations(range(len(factors)), 2):
        met = {(case[one], case[other]) for case in by_turns(2)}
        assert met == set(product(factors[one], factors[other]))


@pytest.mark.parametrize("world", [3, 4, 8])
def test_pairwise_on_more_ranks(world: int) -> None:
    cases = pairs(world)[:: 2 if world == 8 else 1]
    assert {case.way for case in cases} == set(ways(world))
    check(spawn(world, compare, cases, world, False), cases)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_whole_product(world: int) -> None:
    cases = whole_product(world) + pairs(world, sinks=(True,))
    check(spawn(world, compare, cases, world, False), cases)


def test_a_wrong_token_order_is_seen() -> None:
    # Regular documents look the same from either end.
    rows = [name for name in rows_of(2) if name != "packed regular"]
    factors = ways(2), HEADS, rows, (None,), AGAIN, (False, True)
    cases = [Case(*one) for one in pairwise(*factors)]
    assert {(c.way, c.rows) for c in cases} == set(product(ways(2), rows))
    for found in spawn(2, compare, cases, 2, True):
        for case, (off, _, _) in found.items():
            assert max(off) > 1e-3, f"{case} did not notice tokens in the wrong order"


def test_a_message_too_many_is_seen(on_two: list[dict[Case, Any]]) -> None:
    cases = by_turns(2)
    answers = [{case: answer[case] for case in cases} for answer in on_two]
    check(answers, cases)
    for case in cases:
        off, sent, cost = answers[1][case]
        for kind, (size, messages) in sent.items():
            for more in ((size + 8, messages), (size, messages + 1)):
                told = {**sent, kind: type(sent[kind])(*more)}
                at_most = busiest([answers[0][case][1], told])
                grew = at_most != busiest([answers[0][case][1], sent])
                if cost and grew:
                    with pytest.raises(AssertionError, match="the books"):
                        check([answers[0], {**answers[1], case: (off, told, cost)}], cases)


LEAKS = [("28/4", None), ("28/4", 11), ("mqa", None)]
"""Heads and window."""
OTHER_KERNELS = {"capped": lambda: TorchCapped(2.0), "varlen": varlen_on_cpu}


def leak(
    rank: int, world: int, kernels: tuple[str | None, ...], cases: list[tuple[str, int | None]]
) -> dict[str, list[bool]]:
    """What a document knows of the others, by all that was varied."""
    found = {}
    for name, way, (heads, window) in product(kernels, ways(world), cases):
        kernel = OTHER_KERNELS[name]() if name else None
        bench = Bench.of(way, window, kernel)
        for rows in ("packed odd", "unlike rows"):
            layer = Layer(bench, rows_of(world)[rows], window)
            inputs = make_inputs(HEADS[heads], sum(row.length for row in layer.rows))
            for document, answer in leaks(layer, inputs, SCALE).items():
                found[f"{name} {way} {heads} {window} {rows} {document}"] = answer
    return found


def check_leaks(answers: list[dict[str, list[bool]]], cases: int) -> None:
    for answer in answers:
        assert len(answer) == cases * (4 + 3)
        assert all(map(all, answer.values())), [k for k, v in answer.items() if not all(v)]


@pytest.mark.parametrize("world", [1, 4])
def test_documents_never_see_one_another(world: int) -> None:
    cases = LEAKS[world > 1 :]
    answers = spawn(world, leak, world, (None,), cases)
    check_leaks(answers, len(ways(world)) * len(cases))


def test_documents_never_see_one_another_with_any_kernel() -> None:
    cases = [("gqa", None), ("mqa", 11)]
    answers = spawn(2, leak, 2, tuple(OTHER_KERNELS), cases)
    check_leaks(answers, len(OTHER_KERNELS) * len(ways(2)) * len(cases))


class Mingled(Layer):
    """Attends as if two documents were one."""

    def documents(self) -> list[tuple[int, int]]:
        return [(0, 17), (17, 40), *super().documents()[1:]]


@pytest.mark.parametrize("kernel", [None, *OTHER_KERNELS])
def test_documents_that_see_one_another_are_noticed(kernel: str | None) -> None:
    bench = Bench.alone(OTHER_KERNELS[kernel]() if kernel else None)
    layer = Mingled(bench, [Segments((0, 40, 41, 95), 96)], None)
    found = leaks(layer, make_inputs(HEADS["gqa"], 96), SCALE)
    # The second sees keys of the first; the first gets gradients from queries of the second.
    assert not any(found[17, 40][:4])
    assert not any(found[0, 17][2:4])
    assert all(found[40, 41]) and all(found[41, 95])


def test_the_registry_is_covered() -> None:
    tried = {way.name for world in (1, 2, 4) for way in ways(world)}
    assert tried == set(ALGORITHMS)
