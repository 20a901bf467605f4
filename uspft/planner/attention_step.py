"""The predicted seconds of attention and of the recurrence in layers with a state, and of what
ranks send for both.

The work and traffic of attention are found in one of two ways. Exactly: the row is assigned to
ranks as in a run, and its (query, key) pairs and bytes are counted; for packed rows that assignment
is a search, and slow. Or by closed forms, with which `plan` compares layouts. If one document fills
a row, each of r ranks has 1/r of the pairs, and what it sends is linear in r, so that it suffices
to count on a ring of at most FEW ranks. In packed rows the busiest rank has a little more than 1/r,
and an algorithm that sends keys only to ranks that need them sends in proportion to the longest
document; a row of a few documents shows whether an algorithm does.

The recurrence is predicted from its matrix products in chunks (arXiv 2412.06464), without a
kernel's other work and the convolution's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, mul, sub
from typing import Any, cast

from uspft.families import ModelShape, StateSizes, state_sizes
from uspft.planner.stages import cut_by_flops
from uspft.planner.step_shape import DrawnRows, PlacedStep, StepPart, StepShape
from uspft.segments import Segments
from uspft.sequence import ONCE, Algorithm, Cost, Forwards, Heads, Traffic
from uspft.sequence.rows.balance import MAX_IMBALANCE
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.share import Share, everyones
from uspft.sequence.rows.traffic import heads_traffic, in_turns, state_cost, widest_kv

EXCHANGES = 2
"""The exchanges of heads in one direction of a layer: before and after attention."""


def wire_of(cost: Cost, placed: PlacedStep) -> dict[str, StepPart]:
    """Return the transfers of one layer in one direction, by kind. cost: what one row sends."""
    rows = placed.options.micro_batch

    def messages(name: str, each: Traffic, *axes: str, to_next: bool = False) -> StepPart:
        of = rows * each.bytes, each.messages, placed.spread(*axes)
        return StepPart(name, placed.hardware.messages_seconds(*of, to_next=to_next), bytes=of[0])

    heads = rows * cost.all_to_all.bytes / EXCHANGES
    return {
        "ring": messages("ring", cost.ring, "ring", to_next=True),
        "gather": messages("gather", cost.gather, "ring"),
        "all_to_all": placed.sent("all_to_all", "all_to_all", heads, ("ulysses",), EXCHANGES),
        "states": messages("states", cost.state, "ulysses", "ring"),
    }


JOIN_BYTES = (18, 10)
"""Bytes read and written per element of a query when the partial result of newly arrived keys is
merged: of the output forward (kernels/merge.py), and of the query's gradient backward."""


def attention_parts(placed: PlacedStep, window: int | None) -> Iterator[StepPart]:
    """Yield the attention of a layer with this window, forward and backward, and its transfers."""
    often = placed.options.attention
    for part in attention_one_way(placed, window):
        yield part.times(often.heads if part.name == "all_to_all" else often.keys)
    yield from attention_one_way(placed, window, backward=True)


def attention_one_way(
    placed: PlacedStep, window: int | None = None, *, backward: bool = False
) -> list[StepPart]:
    """Return the seconds of one layer's attention and its transfers, in one direction, once.

    Keys arrive while attention to earlier ones is computed: the hardware's `hide` is the share of
    the possible overlap that is reached. Attention to the last keys to arrive overlaps with
    nothing, and neither do their gradients, which are sent back after it. The exchanges of heads
    before and after attention overlap with nothing.
    """
    step, layout, hardware = placed.step, placed.layout, placed.hardware
    work = _work(placed, window)
    heads = local_heads(step.model.of_window(window), layout.mesh_columns)
    most, _ = split_heads(heads.query, heads.kv, layout.ulysses).widest
    rows = placed.options.micro_batch
    pairs, arrivals = rows * work.pairs, work.forward.arrivals
    computed = hardware.attention_seconds(pairs, most, heads.dim, backward=backward)
    joined = JOIN_BYTES[backward] * rows * work.joined * most * heads.dim
    beside = arrivals * hardware.attention.launch_seconds + hardware.memory_seconds(joined)
    moved = wire_of(work.backward if backward else work.forward, placed)
    waits = (layout.ring - 1) / (layout.ring * max(1, arrivals))
    for name in ("ring", "gather"):
        able = moved[name].seconds * (1 - work.home_share / max(1, arrivals) if backward else 1)
        hidden = hardware.hide * min(able, computed * (1 - waits))
        moved[name] = moved[name]._replace(hidden=hidden)
    wire = (moved[name] for name in ("ring", "gather", "all_to_all"))
    return [StepPart("attention", computed + beside), *wire]


def _work(placed: PlacedStep, window: int | None) -> AttentionWork:
    step, layout, algorithm = placed.step, placed.layout, placed.algorithm
    element, at_once = step.options.element, step.options.at_once
    chunks = step.options.schedule.chunks if layout.pipeline > 1 else 1
    assert algorithm
    heads = local_heads(step.model.of_window(window), layout.mesh_columns)
    found = attention_of(algorithm, step.drawn, heads, element, window, dealt=step.dealt)
    if chunks > 1 and layout.ring > 1:
        found = in_chunks(found, chunks, _brought(step, window))
    if at_once is None:
        return found
    tokens = step.row.length // (algorithm.ring * algorithm.ulysses)
    return in_groups(found, algorithm, heads, tokens * element, at_once)


def _brought(step: StepShape, window: int | None) -> float:
    """Return by how much a layer with this window sends more keys when rows are cut into chunks, as
    a factor: the mean over rows."""
    cut = cut_by_flops(step.model, step.options.schedule.chunks, 1)
    rows = step.drawn.rows
    return sum(cut.brought(row, window) for row in rows) / len(rows)


def local_heads(model: ModelShape, tensor: int) -> Heads:
    """Return the heads of one layer on a tensor rank."""
    return Heads(model.heads, model.kv_heads, model.head_dim).on(tensor)


CHUNK_TOKENS = 64
"""The chunk size of the recurrence's kernel: the state passes from chunk to chunk."""
SUMMARY_WORK = 0.8
"""The work of a fragment's summary, as a multiple of a forward's without it: the recurrence once
more over wider values, without reading them."""
BACKWARD_WORK = 3
"""The work of a backward as a multiple of a forward's; it recomputes each fragment's forward."""


def state_parts(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield the seconds of a layer's recurrence forward and backward, and its transfers.

    The transfers overlap with nothing. The convolution is recomputed whenever its layer is.
    """
    step, layout, hardware = placed.step, placed.layout, placed.hardware
    sizes = state_sizes(step.model)
    if sizes is None or not step.options.micro_batch:
        return
    mine, again = sizes.on(layout.mesh_columns), step.options.attention
    most, _ = split_heads(mine.values, mine.keys, layout.ulysses).widest
    heads, key, chunk = placed.tokens * layout.ulysses * most, mine.key_dim, CHUNK_TOKENS
    width = 2 * chunk + chunk * (key + 2 * mine.value_dim) / key + 3 * mine.value_dim
    one = hardware.product_seconds(heads, key, width, step.options.element)
    summary = SUMMARY_WORK if layout.ring > 1 else 0.0
    rule = (again.keys * (1 + summary) + BACKWARD_WORK) * one
    yield StepPart("states", rule)
    assert placed.algorithm
    forward, backward = _state_work(step, placed.algorithm, mine)
    for cost, often in ((forward, again), (backward, ONCE)):
        moved = wire_of(cost, placed)
        yield moved["states"].times(often.keys)
        yield moved["all_to_all"].times(often.heads)


def _state_work(step: StepShape, algorithm: Algorithm, sizes: StateSizes) -> tuple[Cost, Cost]:
    of = sizes, step.options.element, step.options.at_once
    if step.sample is None and (step.dealt or is_whole(step.row, None)):
        return state_work(algorithm, step.row, *of)
    whole = state_work(algorithm, Segments.single(step.row.length), *of)
    if step.sample is None or algorithm.ring == 1:
        return whole
    # The share of the ring's ranks over which a document of this share of the row extends.
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
    """Return what one layer with a state sends for a row, forward and backward. at_once: as in
    Forwards."""
    order = algorithm.token_order(row)
    return each_way(
        lambda often: state_cost(
            row, order, algorithm.ulysses, sizes, element_bytes, often, often.keys
        ),
        at_once,
    )


FEW = 8
"""The largest ring on which closed forms count what an algorithm sends."""
SHARE_TOKENS = 8192
"""The tokens of each of its ranks: enough that keys arrive in several pieces."""
PACKED_WORK = MAX_IMBALANCE - 0.01
"""The busiest rank's work in a packed row, divided by the mean: a little less than the assignment
allows."""
DOCUMENTS = 3
"""The documents of the row that shows whether an algorithm sends keys only to ranks that see
them."""
DEALT_RING = 64
"""The largest ring for which rows are assigned to ranks exactly."""


@dataclass(frozen=True)
class AttentionWork:
    """What the busiest ranks of one layer compute and send for one row."""

    pairs: float
    """(query, key) pairs."""
    joined: float
    """Queries whose partial results are merged, counted once for each merge: the mean over
    ranks."""
    forward: Cost
    """What one forward sends."""
    backward: Cost
    """What the backward sends, including keys that it fetches again."""

    @property
    def arrivals(self) -> int:
        """The number of steps in which other ranks' keys arrive in the forward."""
        return self.forward.arrivals

    @property
    def home_share(self) -> float:
        """The share of gradients in the keys, values and gradients that the backward sends."""
        ways = (self.forward, self.backward)
        there, back = (cost.ring.bytes + cost.gather.bytes for cost in ways)
        return (back - there if back > there else back) / back if back else 0.0


def is_whole(row: Segments, window: int | None) -> bool:
    """Tell whether one document fills a row and the window does not cut it, so that closed forms
    are exact."""
    return row.bounds[1:] == (row.length,) and (window is None or window >= row.length)


@lru_cache(maxsize=4096)
def attention_of(
    algorithm: Algorithm,
    rows: DrawnRows,
    heads: Heads,
    element_bytes: int,
    window: int | None,
    *,
    dealt: bool,
) -> AttentionWork:
    """Return the mean work of rows by closed forms. window: the layer's, in keys. dealt: whether a
    few of the rows, or the only one, are counted exactly, and the mean multiplied by the ratio of
    exact to closed for these."""
    of, few = (heads, element_bytes, window), rows.dealt
    closed = _closed(algorithm, rows, *of)
    cut = [not is_whole(row, window) for row in few.rows]
    if not dealt or not any(cut) or algorithm.ring == 1 or algorithm.ring > DEALT_RING:
        return closed
    exact = [
        _dealt(algorithm, row, *of) if there else _closed(algorithm, DrawnRows.alone(row), *of)
        for row, there in zip(few.rows, cut, strict=True)
    ]
    return _corrected(closed, _closed(algorithm, few, *of), exact)


def _corrected(
    closed: AttentionWork, of_few: AttentionWork, exact: Sequence[AttentionWork]
) -> AttentionWork:
    """Return the closed forms' work of all rows times the ratio of exact to closed for a few."""

    def times(whole: float, said: float, *found: float) -> float:
        mean = sum(found) / len(found)
        return whole * mean / said if said else mean

    def cost(*every: Cost) -> Cost:
        sent = _of_each(lambda *numbers: round(times(*numbers)), *every)
        return replace(sent, arrivals=every[2].arrivals)

    every = (closed, of_few, *exact)
    return AttentionWork(
        times(*(one.pairs for one in every)),
        times(*(one.joined for one in every)),
        cost(*(one.forward for one in every)),
        cost(*(one.backward for one in every)),
    )


def in_chunks(work: AttentionWork, chunks: int, brought: float) -> AttentionWork:
    """Return the work of attention over rows cut into chunks. work: over whole rows. brought: the
    factor by which more keys are sent."""
    each = (one.all_to_all for one in (work.forward, work.backward))
    there, back = (one._replace(messages=chunks * one.messages) for one in each)
    return _in_turns(work, there, back, brought, chunks)


def in_groups(
    work: AttentionWork, algorithm: Algorithm, heads: Heads, token_bytes: int, at_once: int
) -> AttentionWork:
    """Return the work of attention in groups of heads. work: with all heads at once.

    token_bytes: the bytes of one feature of all of a rank's tokens. at_once: as in Forwards.
    """
    together, turns = in_turns(heads, algorithm.ulysses, at_once)
    share = together * turns / widest_kv(heads, algorithm.ulysses)
    exchanged = _exchanged(heads, algorithm.ulysses, token_bytes, at_once)
    return _in_turns(work, *exchanged, share, turns)


def _in_turns(
    work: AttentionWork, there: Traffic, back: Traffic, share: float, turns: int
) -> AttentionWork:
    """Return the work if keys and values are sent in several turns. share: the bytes of all turns
    as a factor of those without turns. there, back: the exchange of heads, forward and backward."""

    def cost(plain: Cost, heads: Traffic) -> Cost:
        sent = _of_each(round, _times(plain, share, turns))
        return replace(sent, all_to_all=heads, arrivals=turns * plain.arrivals)

    return replace(work, forward=cost(work.forward, there), backward=cost(work.backward, back))


def each_way(cost: Callable[[Forwards], Cost], at_once: int | None = None) -> tuple[Cost, Cost]:
    """Return what a layer sends in one forward, and in its backward.

    cost: a function that returns what it sends forward and backward together, with a number of
    forwards. at_once: as in Forwards.
    """
    once, again = (cost(Forwards(n, n, at_once)) for n in (1, 2))
    forward = _of_each(sub, again, once)
    return forward, _of_each(sub, once, forward)


KINDS = ("all_to_all", "ring", "gather", "state")


def _of_each(number: Callable[..., Any], *costs: Cost) -> Cost:
    """Return the cost whose numbers are `number` of the corresponding numbers of the costs."""
    every = {kind: [getattr(one, kind) for one in costs] for kind in KINDS}
    made: dict[str, Any] = {kind: Traffic(*map(number, *of)) for kind, of in every.items()}
    return replace(costs[0], **made)


def _times(cost: Cost, of_bytes: float, of_messages: float) -> Cost:
    """Return a cost with its bytes and its messages multiplied by these factors, not rounded."""
    by = Traffic(of_bytes, of_messages)  # type: ignore[arg-type]
    return _of_each(mul, cost, Cost(by, by, by, state=by))


def _closed(
    algorithm: Algorithm, sample: DrawnRows, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the mean work of rows, extrapolated from that on a few ranks."""
    ring, length = algorithm.ring, sample.rows[0].length
    longest = sample.longest_share * length
    if window is not None and window >= longest:
        window = None
    mean = sample.pairs(window) / ring
    tokens = length // (ring * algorithm.ulysses)
    there, back = _exchanged(heads, algorithm.ulysses, tokens * element_bytes)
    if ring == 1:
        return AttentionWork(mean, 0.0, Cost(there), Cost(back))
    alone = window is None and longest == length
    found = _drawn_out(algorithm, length // ring, None if alone else longest, window)
    key_bytes = widest_kv(heads, algorithm.ulysses) * heads.dim * element_bytes

    def cost(moved: Cost, exchanged: Traffic) -> Cost:
        return replace(_of_each(round, _times(moved, key_bytes, 1)), all_to_all=exchanged)

    busiest = 1.0 if alone else PACKED_WORK
    ways = cost(found.forward, there), cost(found.backward, back)
    return AttentionWork(mean * busiest, found.joined, *ways)


def _exchanged(
    heads: Heads, ulysses: int, token_bytes: int, at_once: int | None = None
) -> tuple[Traffic, Traffic]:
    """Return what a rank sends in the exchanges of heads of a forward, and of the backward. The
    arguments are as in `in_groups`; at_once: None for all heads."""
    if ulysses == 1:
        return Traffic(), Traffic()
    there, back = each_way(
        lambda often: Cost(heads_traffic(heads, ulysses, token_bytes, 1, often)), at_once
    )
    return there.all_to_all, back.all_to_all


def _drawn_out(
    algorithm: Algorithm, tokens: int, longest: float | None, window: int | None
) -> AttentionWork:
    """Return the work on the whole ring, extrapolated from a few ranks; pairs are not scaled, and
    bytes are for keys of one byte per token.

    tokens: of each ring rank. longest: the tokens of a row's longest document; None if it fills the
    row and no window cuts it.
    """
    ring, few = algorithm.ring, min(FEW, algorithm.ring)
    size = SHARE_TOKENS if few > 4 else max(2, min(tokens - tokens % 2, SHARE_TOKENS))
    small = _smaller(algorithm, few)
    one, arrivals = _on_few(small, size, 1), _steps(algorithm, _on_few(small, size, 1))
    far, wide = (ring - 1) / (few - 1), tokens / size
    joined = one.joined * wide * arrivals / max(1, one.arrivals)
    forward, backward = (
        replace(_times(_times(cost, far, far), wide, 1), arrivals=arrivals)
        for cost in (one.forward, one.backward)
    )
    if longest is None:
        return replace(one, joined=joined, forward=forward, backward=backward)
    # A rank's tokens are in at least two places, each of which sees a window of keys before it.
    seen = longest if window is None else min(longest, 2 * window)
    reach = min(1.0, seen / tokens / (ring - 1))
    packed, there, back = _on_few(small, size, DOCUMENTS), forward, backward
    if _trimmed(one.forward, packed.forward):
        there = _reaching(forward, reach)
        # Without a window the rank at a document's end sends least back; with one no rank does.
        back = _reaching(back if window is None else _of_each(max, forward, back), reach)
    elif _trimmed(*(_of_each(sub, each.backward, each.forward) for each in (one, packed))):
        # In the backward keys go round the whole ring, gradients only where keys were seen.
        back = _of_each(add, forward, _reaching(_of_each(sub, backward, forward), reach))
    return replace(one, joined=joined * reach, forward=there, backward=back)


def _reaching(moved: Cost, reach: float) -> Cost:
    """Return what is sent if each rank needs the share `reach` of the others' keys. The share of
    messages is larger, since those to farther ranks are smaller."""
    return _times(moved, reach, min(1.0, 2 * reach))


def _trimmed(one: Cost, packed: Cost) -> bool:
    """Tell whether an algorithm sends less for a row of several documents than for one."""
    few, all_of_it = (cost.ring.bytes + cost.gather.bytes for cost in (packed, one))
    return few < 0.9 * all_of_it


def _steps(algorithm: Algorithm, one: AttentionWork) -> int:
    """Return the number of steps in which keys arrive, from that on a few ranks."""
    if stages := getattr(algorithm, "stages", 0):
        return int(stages)
    each = one.arrivals >= FEW - 1 and algorithm.ring > FEW
    return algorithm.ring - 1 if each else one.arrivals


def _smaller(algorithm: Algorithm, ring: int) -> Algorithm:
    """Return the algorithm on a shorter ring on one host, with Ulysses degree 1."""
    changes: dict[str, Any] = {"ring": ring, "ulysses": 1}
    for name in ("per_host", "window"):
        if hasattr(algorithm, name):
            changes[name] = None
    if getattr(algorithm, "stages", 0) >= ring:
        changes["stages"] = 0
    made: Algorithm = replace(cast("Any", algorithm), **changes)
    return made


@lru_cache(maxsize=1024)
def _on_few(algorithm: Algorithm, tokens: int, documents: int) -> AttentionWork:
    """Return the exact work of a row of equal documents on a short ring; bytes are for keys of one
    byte per token.

    tokens: of each rank.
    """
    length = algorithm.ring * tokens
    row = Segments(tuple(n * length // documents for n in range(documents + 1)), length)
    return _dealt(algorithm, row, Heads(1, 1, 1), 1, None)


def _dealt(
    algorithm: Algorithm, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    shares = everyones(row, algorithm.token_order(row), algorithm.ulysses, window)
    forward, backward = each_way(
        lambda often: algorithm.cost(row, heads, element_bytes, window, often)
    )
    pairs = max(share.area for share in shares)
    return AttentionWork(pairs, _joined(shares, forward.arrivals), forward, backward)


def _joined(shares: Sequence[Share], arrivals: int) -> float:
    """Return how many merges of partial results a ring rank makes, counted per query: the mean.

    A query's results are merged once in each step in which keys arrive that it sees.
    """
    met = 0
    for share in shares:
        others = (blocks for j, blocks in enumerate(share.blocks) if j != share.ring_index)
        met += sum(block.q1 - block.q0 for blocks in others for block in blocks)
    others_met = max(1, len(shares) - 1)
    return met / len(shares) * arrivals / others_met
