"""The seconds of what crosses tokens: of attention, of layers with a state beside those of their
projections, and of what ranks send for both.

A state's rule is priced as its matrix products in chunks (arXiv 2412.06464); what a kernel takes
beside them, and the convolution's arithmetic, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from uspft.families import NO_KEYS, ModelShape, StateSizes, state_sizes
from uspft.layout import Layout
from uspft.planner.attention_work import (
    AttentionWork,
    DrawnRows,
    attention_of_row,
    attention_of_sample,
    each_way,
    in_chunks,
    in_groups,
    is_whole,
)
from uspft.planner.machine import Hardware, Spread
from uspft.planner.stages import cut_by_flops
from uspft.planner.step_shape import StepPart, StepShape
from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Heads, Traffic
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.traffic import state_cost

EXCHANGES = 2
"""Of heads for tokens and back, each way through a layer's attention."""


def wire_of(cost: Cost, layout: Layout, hardware: Hardware, rows: int = 1) -> dict[str, StepPart]:
    """Return what one layer of so many rows moves one way under a layout, by kind."""
    host = hardware.ranks_per_host

    def messages(name: str, each: Traffic, *axes: str, to_next: bool = False) -> StepPart:
        of = rows * each.bytes, each.messages, Spread.of(layout, axes, host)
        return StepPart(name, hardware.messages_seconds(*of, to_next=to_next), bytes=of[0])

    heads, group = rows * cost.all_to_all.bytes, Spread.of(layout, ("ulysses",), host)
    once = hardware.collective_seconds("all_to_all", heads / EXCHANGES, group)
    return {
        "ring": messages("ring", cost.ring, "ring", to_next=True),
        "gather": messages("gather", cost.gather, "ring"),
        "all_to_all": StepPart("all_to_all", EXCHANGES * once, bytes=heads),
        "states": messages("states", cost.state, "ulysses", "ring"),
    }


JOIN_BYTES = (18, 10)
"""Read and written for each element of a query where what one arrival of keys gives is joined with
what is there: forward (kernels/merge.py), and backward its gradient."""


def attention_parts(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> Iterator[StepPart]:
    """Yield the attention of one forward and backward of all layers, and what it moves."""
    for window, layers in Counter(step.windows).items():
        if window == NO_KEYS:
            continue
        of = step, layout, algorithm, hardware, window
        again = {"attention": step.attention.keys, "all_to_all": step.attention.heads}
        for part in attention_one_way(*of):
            yield part.times(layers * again.get(part.name, step.attention.keys))
        for part in attention_one_way(*of, backward=True):
            yield part.times(layers)


def attention_one_way(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    window: int | None = None,
    *,
    backward: bool = False,
) -> list[StepPart]:
    """Return what one layer's attention takes in one direction, once, and what it moves.

    Keys come while attention to those that are there goes on: of what both could do at the same
    time, the hardware's `hide` is done so. Nothing hides what waits for the last to arrive, nor the
    gradients of these that go home after it. Heads are exchanged before and after, and nothing
    hides that.
    """
    work = _work(step, layout, algorithm, window)
    heads = local_heads(step.model.of_window(window), layout.mesh_columns)
    shares = split_heads(heads.query, heads.kv, layout.ulysses).query
    most = max(last - first for first, last in shares)
    pairs, arrivals = step.rows * work.pairs, work.forward.arrivals
    computed = hardware.attention_seconds(pairs, most, heads.dim, backward=backward)
    joined = JOIN_BYTES[backward] * step.rows * work.joined * most * heads.dim
    beside = arrivals * hardware.attention.launch_seconds + hardware.memory_seconds(joined)
    moved = wire_of(work.backward if backward else work.forward, layout, hardware, step.rows)
    waits = (layout.ring - 1) / (layout.ring * max(1, arrivals))
    for name in ("ring", "gather"):
        able = moved[name].seconds * (1 - work.home_share / max(1, arrivals) if backward else 1)
        hidden = hardware.hide * min(able, computed * (1 - waits))
        moved[name] = moved[name]._replace(hidden=hidden)
    wire = (moved[name] for name in ("ring", "gather", "all_to_all"))
    return [StepPart("attention", computed + beside), *wire]


def _work(
    step: StepShape, layout: Layout, algorithm: Algorithm, window: int | None
) -> AttentionWork:
    heads = local_heads(step.model.of_window(window), layout.mesh_columns)
    of = heads, step.element_bytes, window
    if step.sample is None and (step.dealt or is_whole(step.row, window)):
        found = attention_of_row(algorithm, step.row, *of)
    else:
        rows = step.sample or DrawnRows((step.row,))
        found = attention_of_sample(algorithm, rows, *of, dealt=step.dealt)
    if layout.pipeline > 1 and step.schedule.chunks > 1 and layout.ring > 1:
        found = in_chunks(found, step.schedule.chunks, _brought(step, window))
    if step.attention.at_once is None:
        return found
    tokens = step.row.length // (algorithm.ring * algorithm.ulysses)
    return in_groups(found, algorithm, heads, tokens * step.element_bytes, step.attention.at_once)


def _brought(step: StepShape, window: int | None) -> float:
    """Return how often chunks of rows make keys come in a layer with this window, the mean."""
    cut = cut_by_flops(step.model, step.windows, step.schedule.chunks, 1)
    rows = step.sample.rows if step.sample else (step.row,)
    return sum(cut.brought(row, window) for row in rows) / len(rows)


def local_heads(model: ModelShape, tensor: int) -> Heads:
    """Return the heads of one layer on a tensor rank.

    A KV head that does not divide is replicated.
    """
    return Heads(-(-model.heads // tensor), -(-model.kv_heads // tensor), model.head_dim)


CHUNK_TOKENS = 64
"""Of the rule, between whose chunks the state passes."""
SUMMARY_WORK = 0.8
"""What a summary takes in a forward without one: the rule again over wider values, without reading
them."""
BACKWARD_WORK = 3
"""Forwards' worth of a backward, which makes the graph of each fragment again."""


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
    forward, backward = _state_work(step, algorithm, mine)
    for cost, heads, keys in ((forward, again.heads, again.keys), (backward, 1, 1)):
        moved = wire_of(cost, layout, hardware, step.rows)
        yield moved["states"].times(layers * keys)
        yield moved["all_to_all"].times(layers * heads)


def _rule_seconds(step: StepShape, sizes: StateSizes, heads: float, hardware: Hardware) -> float:
    """Return the seconds of the rule's products of one forward. heads: value heads of all tokens
    of a rank."""
    key, value, chunk = sizes.key_dim, sizes.value_dim, CHUNK_TOKENS
    width = 2 * chunk + (chunk * (key + value) + chunk * value) / key + 3 * value
    return hardware.product_seconds(heads, key, width, step.element_bytes)


def _state_work(step: StepShape, algorithm: Algorithm, sizes: StateSizes) -> tuple[Cost, Cost]:
    of = sizes, step.element_bytes, step.attention.at_once
    if step.sample is None and (step.dealt or is_whole(step.row, None)):
        return state_work(algorithm, step.row, *of)
    whole = state_work(algorithm, Segments.single(step.row.length), *of)
    if step.sample is None or algorithm.ring == 1:
        return whole
    # A document of a share of the row meets so many of the ring's ranks.
    share = min(1.0, 2 * algorithm.ring * step.sample.longest_share / (algorithm.ring - 1))
    forward, backward = (
        replace(one, state=Traffic(*(round(share * n) for n in one.state))) for one in whole
    )
    return forward, backward


@lru_cache(maxsize=4096)
def state_work(
    algorithm: Algorithm,
    row: Segments,
    sizes: StateSizes,
    element_bytes: int,
    at_once: int | None = None,
) -> tuple[Cost, Cost]:
    """Return what one layer with a state sends for a row. at_once: as of Forwards."""
    order = algorithm.token_order(row)
    return each_way(
        lambda often: state_cost(
            row, order, algorithm.ulysses, sizes, element_bytes, often, often.keys
        ),
        at_once,
    )
