"""DeepSpeed Ulysses: heads are split while attention runs, tokens elsewhere (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uspft.batch import Segments
from uspft.kernels import Grouped, Kernel
from uspft.sequence.algorithm import Cost, Heads, Rule, Split, Traffic, rows_must_divide
from uspft.sequence.blockwise import attend_blocks
from uspft.sequence.heads import gather_heads, scatter_heads, split_heads
from uspft.sequence.order import balanced
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run


@dataclass(frozen=True)
class Ulysses:
    """Consecutive tokens on each rank; an all-to-all before attention and one after."""

    ulysses: int
    ring: int = 1
    name = "ulysses_cp"
    megatron_name = "a2a"

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, self.ulysses, "one for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        return balanced(segments, self.ulysses, 1)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        return blocks_over_heads(qkv, plan, rule, split)

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        tokens = segments.length // self.ulysses
        return Cost(all_to_all=heads_traffic(heads, self.ulysses, tokens, element_bytes))


Inner = Callable[[tuple[Tensor, Tensor, Tensor], Rule, Kernel], Tensor]
"""Attention out [T, h, D] of some heads of a ring rank's tokens, with the rule and the kernel that
fit them."""


def attend_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split, inner: Inner
) -> Tensor:
    """Ulysses exchange around attention: q [t, H, D], k, v [t, G, D] → out [t, H, D]."""
    size, first = split.ulysses.size, split.ring.index * split.ulysses.size
    if size == 1:
        return inner(qkv, rule, split.kernel)
    tokens = plan.tokens[first : first + size]
    query, kv = qkv[0].shape[1], qkv[1].shape[1]
    shares = split_heads(query, kv, size)
    groups = shares.groups(split.ulysses.index, query // kv)
    kernel = split.kernel if len(groups) == 1 else Grouped(split.kernel, groups)
    mine = rule.of_heads(shares.query[split.ulysses.index])
    q, k, v = scatter_heads(qkv, tokens, split.ulysses)
    sorting = plan.sorting
    if sorting is None:
        return gather_heads(inner((q, k, v), mine, kernel), shares, tokens, split.ulysses)
    index, received = plan.once(("sorting", q.device), lambda: _both_ways(sorting, q.device))
    q, k, v = (x.index_select(0, index) for x in (q, k, v))
    out = inner((q, k, v), mine, kernel).index_select(0, received)
    return gather_heads(out, shares, tokens, split.ulysses)


def blocks_over_heads(
    qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
) -> Tensor:
    """Ulysses exchange around attention over blocks, which a ring brings where it is larger than
    one rank."""

    def inner(qkv: tuple[Tensor, Tensor, Tensor], rule: Rule, kernel: Kernel) -> Tensor:
        return attend_blocks(qkv, plan, rule, split.ring, kernel)

    return attend_over_heads(qkv, plan, rule, split, inner)


def _both_ways(sorting: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """(index that sorts, index that undoes it), on the device."""
    index = torch.as_tensor(sorting, device=device)
    return index, index.argsort()


def heads_traffic(heads: Heads, ulysses: int, tokens: int, element_bytes: int) -> Traffic:
    """What the busiest of `ulysses` ranks of `tokens` tokens sends, forward and backward.

    Forward: the others' shares of q, k, v, then its own heads of out for the others' tokens;
    backward the same sizes again, the other way round. 2 · (U − 1) / U · (2H + 2G) · tokens · D
    elements where the heads divide, in 4 · (U − 1) messages.
    """
    shares = split_heads(heads.query, heads.kv, ulysses)
    own = [(b - a, 2 * (d - c)) for (a, b), (c, d) in zip(shares.query, shares.kv, strict=True)]
    total, busy = sum(q + kv for q, kv in own), sum(1 for q, _ in own if q)
    elements = max(
        (total - q - kv) + (ulysses - 1) * q + (ulysses - 1) * (q + kv) + (heads.query - q)
        for q, kv in own
    )
    messages = max(2 * (ulysses - 1) + 2 * (busy - 1) if q else 2 * busy for q, _ in own)
    return Traffic(elements * tokens * heads.dim * element_bytes, messages)


def widest_kv(heads: Heads, ulysses: int) -> int:
    """KV heads of the member of a Ulysses group that has most."""
    return max(b - a for a, b in split_heads(heads.query, heads.kv, ulysses).kv)
