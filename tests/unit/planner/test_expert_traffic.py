"""What dispatch sends, by the choices that are counted or likely, and where it is as much as ZeRO
gathers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.experts.counted import cost, crossover_tokens, token_cost
from tests.support.shapes import hub
from uspft.families import ModelShape
from uspft.planner.expert_traffic import (
    RoutedRows,
    RowSizes,
    ranks_met,
)

NEXT = hub("Qwen/Qwen3-Next-80B-A3B-Instruct")


QWEN = hub("Qwen/Qwen3-30B-A3B")
MIXTRAL = hub("mistralai/Mixtral-8x7B-v0.1")
OSS = hub("openai/gpt-oss-20b")
ZERO_3 = 2 * 2 + 4
"""Bytes of a parameter: gathered twice in bfloat16, its gradient summed in float32."""
COPIES = {False: 4, True: 6}
"""Of a hidden state that cross one way or the other for each of a token's experts, by whether
layers are recomputed."""


def test_likely_ranks_are_the_mean_over_all_choices() -> None:
    few = replace(MIXTRAL, raw={**MIXTRAL.raw, "num_local_experts": 6})
    for ranks in (1, 2, 3, 6):
        each = 6 // ranks
        sets = [{one // each for one in chosen} - {0} for chosen in combinations(range(6), 2)]
        mean = sum(map(len, sets)) / len(sets)
        assert ranks_met(few, ranks) == pytest.approx(mean)
    assert few.met_experts == 2


@pytest.mark.parametrize(
    ("shape", "again", "tokens"),
    [
        (QWEN, True, 24_576),
        (QWEN, False, 36_864),
        (MIXTRAL, True, 114_688),
        (MIXTRAL, False, 172_032),
        (OSS, True, 46_080),
        (OSS, False, 69_120),
    ],
)
def test_a_token_sent_for_each_expert_crosses_over_at_one_length(
    shape: ModelShape, again: bool, tokens: int
) -> None:
    for ranks in (2, 4, 8):
        copies = COPIES[again] * shape.met_experts * (1 - 1 / ranks)
        sent = copies * shape.hidden_size * 2
        assert crossover_tokens(shape, ranks, ZERO_3, sent) == pytest.approx(tokens)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 98_600), (4, 54_200), (8, 36_800)])
def test_sent_once_a_rank_it_crosses_over_later(ranks: int, tokens: int) -> None:
    sent = COPIES[True] * ranks_met(QWEN, ranks) * QWEN.hidden_size * 2
    assert crossover_tokens(QWEN, ranks, ZERO_3, sent) == pytest.approx(tokens, rel=2e-3)
    # A second run ends before rows return; their scores and choices go with them.
    beside = 3 * 2 * 8 + 2 * 4 * 8  # there, there again, and back; choices there twice
    own = (5 * QWEN.hidden_size * 2 + beside) * ranks_met(QWEN, ranks)
    assert token_cost(QWEN, 2, ranks, forwards=2) == pytest.approx(own)
    assert crossover_tokens(QWEN, ranks, ZERO_3, own) == pytest.approx(tokens * 1.19, rel=1e-2)


def test_shared_experts_are_behind_those_that_are_chosen() -> None:
    assert RowSizes.of(NEXT, 2).returns_again and not RowSizes.of(QWEN, 2).returns_again
    rows = RoutedRows(10, 20, 1, 2)
    sizes = RowSizes(100, 8, 4)
    there, back = 16 + 10 * 112, 20 * 100
    home = 10 * 100 + 20 * 108
    assert cost(rows, sizes, 3) == (there + back + home, 2 + 3 + 2 + 1 + 2 * 2)
    again = cost(rows, sizes, 3, forwards=2)
    assert again.bytes == 2 * there + back + home
    shared = replace(sizes, returns_again=True)
    assert cost(rows, shared, 3, forwards=2).bytes == again.bytes + back


def test_scores_are_as_wide_as_a_family_has_them() -> None:
    assert RowSizes.of(MIXTRAL, 2) == RowSizes(4096 * 2, 2 * 4, 2 * 4)
    assert RowSizes.of(QWEN, 2) == RowSizes(2048 * 2, 8 * 2, 8 * 4)
