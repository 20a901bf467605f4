"""Bytes that the busiest rank sends for one layer with a state, forward and backward, counted from
who holds which tokens: by heads, by states, and where ranks gather the row, as others do."""

from __future__ import annotations

from typing import Any

from benchmarks.attention.documents import documents_of
from uspft.config.algorithms import CONTEXT
from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.sequence.rows.share import Order
from uspft.sequence.rows.traffic import state_cost

SIZES = {
    "Qwen3.5-9B": StateSizes(16, 32, 128, 128),
    "Qwen3-Next-80B-A3B": StateSizes(16, 32, 128, 128),
    "Qwen3.5-27B": StateSizes(16, 48, 128, 128),
}
"""Qwen3-Next's are those of Qwen3.5-9B."""
TOKENS = (8_192, 32_768, 131_072, 524_288)
RANKS = (2, 4, 8, 16)
ELEMENT = 2


def counted() -> list[dict[str, Any]]:
    """Return what each way sends by model, tokens and ranks."""
    return [
        _case(model, tokens, ranks)
        for model in ("Qwen3.5-9B", "Qwen3.5-27B")
        for tokens in TOKENS
        for ranks in RANKS
    ]


def _case(model: str, tokens: int, ranks: int) -> dict[str, Any]:
    sizes, row = SIZES[model], Segments.single(tokens)
    packed = documents_of("code", tokens)
    heads = _order("ulysses_cp", ranks, row)
    stretches: Order = [((r * tokens // ranks, (r + 1) * tokens // ranks),) for r in range(ranks)]
    by_states = {
        "one span": state_cost(row, stretches, 1, sizes, ELEMENT),
        "two spans": state_cost(row, _order("ring_cp", ranks, row), 1, sizes, ELEMENT),
        "packed": state_cost(packed, _order("planned_cp", ranks, packed), 1, sizes, ELEMENT),
    }
    return {
        "model": model,
        "tokens": tokens,
        "ranks": ranks,
        "heads": state_cost(row, heads, ranks, sizes, ELEMENT).all_to_all.bytes,
        "states": {name: cost.state.bytes for name, cost in by_states.items()},
        "gather": gathered_bytes(sizes, tokens, ranks),
    }


def crossing(model: str, ranks: int) -> float:
    """Return above how many tokens of one document states send less than heads, where each rank has
    two stretches of it, as those of a ring."""
    one = _case(model, TOKENS[0], ranks)
    states: int = one["states"]["two spans"]
    return TOKENS[0] * states / float(one["heads"])


def _order(algorithm: str, ranks: int, row: Segments) -> Order:
    row_of = CONTEXT[algorithm]
    both = (ranks, 1) if algorithm == "ulysses_cp" else (1, ranks)
    return make_algorithm(row_of, *both).token_order(row)


def gathered_bytes(sizes: StateSizes, tokens: int, ranks: int) -> int:
    """Return what a rank sends where each gathers q, k, v and gates of the row, and computes it
    whole: its tokens to all others, and all others' gradients back."""
    token = sizes.channels * ELEMENT + sizes.values * (4 + ELEMENT)
    return 2 * (ranks - 1) * (tokens // ranks) * token
