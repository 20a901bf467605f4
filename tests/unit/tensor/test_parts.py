"""Parts of matrices at several degrees: each once, and one inside another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from uspft.parameters.shards import MatrixSplit
from uspft.tensor.parts import part_index, part_range, prime_factors

LARGEST = 24


def chains(degree: int) -> Iterator[tuple[int, ...]]:
    """Every chain of divisors that ends at a degree, each a divisor of the next."""
    yield (degree,)
    for divisor in range(2, degree):
        if degree % divisor == 0:
            yield from ((*before, degree) for before in chains(divisor))


@pytest.mark.parametrize("degree", range(1, LARGEST + 1))
def test_each_part_is_taken_once(degree: int) -> None:
    every = range(degree)
    for chain in chains(degree):
        assert sorted(part_index(rank, degree, chain[:-1]) for rank in every) == [*every]
    assert sorted(part_index(rank, degree) for rank in every) == [*every]


@pytest.mark.parametrize(("units", "count"), [(24, 1777), (97, 1777), (6, 898), (2, 1394)])
def test_a_part_lies_in_the_part_at_every_divisor_of_its_chain(units: int, count: int) -> None:
    """Rank r of a larger degree is rank r modulo the smaller one there."""
    met = 0
    for degree in range(2, LARGEST + 1):
        for chain in chains(degree):
            for rank, (n, (small, large)) in product(range(degree), enumerate(pairwise(chain))):
                if large > units and any(units % n and n % units for n in (small, large)):
                    continue  # heads that several ranks hold are held by equally many
                inner = part_index(rank % large, large, chain[: n + 1])
                outer = part_index(rank % small, small, chain[:n])
                a, b = part_range(units, inner, large)
                c, d = part_range(units, outer, small)
                assert c <= a <= b <= d, (chain, rank)
                met += 1
    assert met == count


def test_contiguous_parts_would_not() -> None:
    """The control: rank 1 of 4 with the second quarter has a quarter of rank 0's half."""
    assert part_range(8, 1, 4)[1] <= part_range(8, 1 % 2, 2)[0]
    assert [part_index(rank, 4) for rank in range(4)] == [0, 2, 1, 3]
    assert [part_index(rank, 6) for rank in range(6)] == [0, 3, 1, 4, 2, 5]
    assert [part_index(rank, 6, (3,)) for rank in range(6)] == [0, 2, 4, 1, 3, 5]


def test_fused_matrices_and_heads_nest_too() -> None:
    qkv = MatrixSplit(0, (64, 16, 16), (8, 2, 2))
    for small, large in ((2, 4), (4, 8), (2, 8)):
        for rank in range(large):
            inner = qkv.ranges(part_index(rank, large), large)
            outer = qkv.ranges(part_index(rank % small, small), small)
            for (a, b), (c, d) in zip(inner, outer, strict=True):
                assert c <= a < b <= d and (b - a) % 8 == 0
    whole = [sorted(qkv.ranges(i, 8)[0] for i in range(8)), {qkv.ranges(i, 8)[1] for i in range(8)}]
    assert whole == [[(8 * i, 8 * i + 8) for i in range(8)], {(64, 72), (72, 80)}]


def test_prime_factors() -> None:
    assert [prime_factors(n) for n in (1, 2, 12, 97)] == [[], [2], [2, 2, 3], [97]]
