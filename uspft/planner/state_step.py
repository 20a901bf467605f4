"""The seconds of layers with a state, beside those of their projections: the rule, and what ranks
send for it.

The rule is priced as its matrix products in chunks (arXiv 2412.06464); what a kernel takes beside
them, and the convolution's arithmetic, are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from uspft.families import NO_KEYS, StateSizes, state_sizes
from uspft.layout import Layout
from uspft.planner.attention_work import is_whole
from uspft.planner.machine import Hardware
from uspft.planner.spread import Spread
from uspft.planner.step_shape import StepPart, StepShape
from uspft.planner.wire import exchanged_seconds
from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Forwards, Traffic
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.traffic import state_cost

CHUNK_TOKENS = 64
"""Of the rule, between whose chunks the state passes."""
SUMMARY_WORK = 0.8
"""What a summary takes in a forward without one: the rule again over wider values, without reading
them."""
BACKWARD_WORK = 3
"""Forwards' worth of a backward, which makes the graph of each fragment again."""


class StateWork(NamedTuple):
    """What the busiest ranks of one layer with a state send for one row, each way."""

    forward: Cost
    backward: Cost


def state_parts(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> Iterator[StepPart]:
    """Yield what the layers with a state take in one forward and backward, and what they move.

    Nothing hides what moves. The convolution runs again wherever its layer does.
    """
    layers, sizes = list(step.windows).count(NO_KEYS), state_sizes(step.model)
    if not layers or sizes is None or not step.rows:
        return
    mine, again = sizes.on(layout.mesh_columns), step.attention
    values = split_heads(mine.values, mine.keys, layout.ulysses).query
    most = max(last - first for first, last in values)
    one = _rule_seconds(step, mine, step.tokens(layout) * layout.ulysses * most, hardware)
    summary = SUMMARY_WORK if layout.ring > 1 else 0.0
    rule = (again.keys * (1 + summary) + BACKWARD_WORK) * one
    yield StepPart("states", layers * rule)
    work = _work(step, algorithm, mine)
    spread = Spread.of(layout, ("ulysses", "ring"), hardware.ranks_per_host)
    for cost, heads, keys in (
        (work.forward, again.heads, again.keys),
        (work.backward, 1, 1),
    ):
        sent = step.rows * cost.state.bytes
        seconds = hardware.messages_seconds(sent, cost.state.messages, spread, to_next=False)
        yield StepPart("states", seconds, bytes=sent).times(layers * keys)
        exchanged = step.rows * cost.all_to_all.bytes
        seconds = exchanged_seconds(exchanged, layout, hardware)
        yield StepPart("all_to_all", seconds, bytes=exchanged).times(layers * heads)


def _rule_seconds(step: StepShape, sizes: StateSizes, heads: float, hardware: Hardware) -> float:
    """Return the seconds of the rule's products of one forward. heads: value heads of all tokens
    of a rank."""
    key, value, chunk = sizes.key_dim, sizes.value_dim, CHUNK_TOKENS
    width = 2 * chunk + (chunk * (key + value) + chunk * value) / key + 3 * value
    return hardware.product_seconds(heads, key, width, step.element_bytes)


def _work(step: StepShape, algorithm: Algorithm, sizes: StateSizes) -> StateWork:
    frozen, of = cast("Hashable", algorithm), (sizes, step.element_bytes, step.attention.at_once)
    if step.sample is None and (step.dealt or is_whole(step.row, None)):
        return state_work(frozen, step.row, *of)
    whole = state_work(frozen, Segments.single(step.row.length), *of)
    if step.sample is None or algorithm.ring == 1:
        return whole
    # A document of a share of the row meets so many of the ring's ranks.
    others = 2 * algorithm.ring * step.sample.longest_share / (algorithm.ring - 1)
    return StateWork(*(_less(cost, min(1.0, others)) for cost in whole))


def _less(cost: Cost, share: float) -> Cost:
    moved = Traffic(round(share * cost.state.bytes), round(share * cost.state.messages))
    return Cost(cost.all_to_all, state=moved)


@lru_cache(maxsize=4096)
def state_work(
    frozen: Hashable,
    row: Segments,
    sizes: StateSizes,
    element_bytes: int,
    at_once: int | None = None,
) -> StateWork:
    """Return what one layer with a state sends for a row. frozen: the algorithm, a dataclass.
    at_once: as of Forwards."""
    algorithm = cast("Algorithm", frozen)
    order = algorithm.token_order(row)
    once, again = (
        state_cost(row, order, algorithm.ulysses, sizes, element_bytes, Forwards(n, n, at_once), n)
        for n in (1, 2)
    )

    def less(a: Traffic, b: Traffic) -> Traffic:
        return Traffic(a.bytes - b.bytes, a.messages - b.messages)

    def both(a: Cost, b: Cost) -> Cost:
        return Cost(less(a.all_to_all, b.all_to_all), state=less(a.state, b.state))

    forward = both(again, once)
    return StateWork(forward, both(once, forward))
