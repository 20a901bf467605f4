"""The variable-length path: its calls, what they copy and send, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.kernels import TILED, TILED_SHAPES, computed, expected
from tests.support.varlen import varlen_on_cpu
from uspft.kernels import Block, Mask, varlen
from uspft.kernels.plain import dense_attention
from uspft.sequence.rows.spans import Holding, blocks_between

PACKED = [Block(a, b, a, b, Mask.CAUSAL) for a, b in pairwise((0, 17, 18, 40, 70))]
HELD = Holding([(0, 70)])
WINDOWED = blocks_between(HELD, HELD, [(0, 50), (50, 53), (53, 70)], 9)
SHARED = (
    Block(0, 20, 0, 30, Mask.FULL),
    Block(20, 30, 30, 35, Mask.FULL),
    Block(35, 70, 0, 31, Mask.FULL),
    Block(0, 20, 35, 55, Mask.FLIPPED),
    Block(20, 40, 60, 80, Mask.FLIPPED),
)
"""Neighbours by query, by key and not at all."""


@pytest.mark.parametrize(
    ("blocks", "runs"), [(PACKED, (1, 1)), (SHARED, (2 + 1, 2 + 2)), (TILED, (4, 5))]
)
def test_neighbours_are_one_part(blocks: Sequence[Block], runs: tuple[int, int]) -> None:
    q, k, v, dout = (torch.randn(n, h, 8) for n, h in TILED_SHAPES)
    parts = varlen_on_cpu().forward((q, k, v), blocks, 0.3)
    lse = torch.zeros(4, 70)
    queries, keys = varlen_on_cpu().backward((q, k, v), (q, lse, dout), blocks, 0.3)
    assert (len(parts), len(queries), len(keys)) == (runs[0], *runs)
    if blocks is PACKED:
        assert (parts[0].q0, parts[0].q1, len(parts[0].out)) == (0, 70, 70)


PREFIXES = [
    *(Block(5 * n, 5 * n + 5, 0, 40 + 10 * n, Mask.FULL) for n in range(5)),
    Block(30, 32, 80, 84, Mask.FULL),
    Block(32, 40, 84, 90, Mask.FULL),
]
"""Runs of a document's queries that see ever more of its keys, and two short documents."""


def test_keys_that_queries_share_are_not_copied_for_each() -> None:
    keys: list[tuple[int, int]] = []
    kernel = varlen_on_cpu(lambda q, k: keys.append((len(k), k.untyped_storage().data_ptr())))
    q, k, v, _ = (torch.randn(n, h, 8) for n, h in TILED_SHAPES)
    kernel.forward((q, k, v), PREFIXES, 0.3)
    copied = [length for length, where in keys if where != k.untyped_storage().data_ptr()]
    assert sum(copied) <= len(k) < sum(b.k1 - b.k0 for b in PREFIXES)
    assert sorted(length for length, _ in keys) == [50, 50, 60, 70, 80]


def test_lengths_are_sent_to_the_device_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, with 70 stages and two windows."""
    sent: list[Tensor] = []
    monkeypatch.setattr(varlen, "put", lambda x, device: sent.append(x) or x)
    varlen.calls.cache_clear()
    kernel, x = varlen_on_cpu(), torch.randn(300, 1, 8)
    stages = [[Block(0, n, n, 2 * n, Mask.FULL)] for n in range(2, 142)]
    for blocks in stages * 2:
        kernel.forward((x, x, x), blocks, 0.3)
    assert len(sent) == 2 * 140


@pytest.mark.parametrize("blocks", [PACKED, WINDOWED, SHARED, PREFIXES, TILED])
def test_the_variable_length_path_equals_dense_attention(blocks: Sequence[Block]) -> None:
    assert blocks
    inputs = tuple(torch.randn(n, h, 8, dtype=torch.float64) for n, h in TILED_SHAPES)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k, v, blocks, 0.3)

    found = computed(varlen_on_cpu(), inputs, blocks)
    at_once = computed(varlen_on_cpu(), inputs, blocks, at_once=True)
    for got, again, want in zip(found, at_once, expected(dense, inputs), strict=True):
        assert torch.allclose(got, want) and torch.allclose(again, want)


def test_a_call_never_has_a_longest_query_of_one() -> None:
    """For that flash attention 2 makes grouped heads queries, and gives lse in their order."""
    single = tuple(Block(n, n + 1, n, n + 1, Mask.CAUSAL) for n in range(3))
    (call,) = varlen.calls(single, 3, torch.device("cpu"))
    assert (call.lengths.longest_q, call.lengths.longest_k) == (2, 1)
