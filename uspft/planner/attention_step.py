"""The seconds of what crosses tokens: of attention, of layers with a state beside those of their
projections, and of what ranks send for both; and what attention computes and sends, each way, dealt
out to ranks or by closed forms.

Of a row that one document fills every rank of r sees 1/r of the pairs of query and key, and what it
sends grows with the number of others: a ring of a few ranks tells that of any. Of packed rows the
busiest rank sees a little more than 1/r, and what is sent where it is needed grows with the longest
document; whether an algorithm sends keys only there, a row of a few documents tells. So a search
deals nothing out but a few rows to a few ranks; dealing out a packed row is itself a search.

A state's rule is priced as its matrix products in chunks (arXiv 2412.06464); what a kernel takes
beside them, and the convolution's arithmetic, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, mul, sub
from typing import Any, Literal, cast

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
"""Of heads for tokens and back, each way through a layer's attention."""


def wire_of(cost: Cost, placed: PlacedStep) -> dict[str, StepPart]:
    """Return what one layer of a pass's rows moves one way, by kind. cost: of a row."""
    rows = placed.step.rows

    def messages(name: str, each: Traffic, *axes: str, to_next: bool = False) -> StepPart:
        of = rows * each.bytes, each.messages, placed.spread(*axes)
        return StepPart(name, placed.hardware.messages_seconds(*of, to_next=to_next), bytes=of[0])

    kind: Literal["all_to_all"] = "all_to_all"
    heads = rows * cost.all_to_all.bytes / EXCHANGES
    return {
        "ring": messages("ring", cost.ring, "ring", to_next=True),
        "gather": messages("gather", cost.gather, "ring"),
        kind: placed.sent(kind, kind, heads, ("ulysses",), EXCHANGES),
        "states": messages("states", cost.state, "ulysses", "ring"),
    }


JOIN_BYTES = (18, 10)
"""Read and written for each element of a query where what one arrival of keys gives is joined with
what is there: forward (kernels/merge.py), and backward its gradient."""


def attention_parts(placed: PlacedStep, window: int | None) -> Iterator[StepPart]:
    """Yield the attention of a layer with this window forward and backward, and what it moves."""
    often = placed.step.attention
    for part in attention_one_way(placed, window):
        yield part.times(often.heads if part.name == "all_to_all" else often.keys)
    yield from attention_one_way(placed, window, backward=True)


def attention_one_way(
    placed: PlacedStep, window: int | None = None, *, backward: bool = False
) -> list[StepPart]:
    """Return what one layer's attention takes in one direction, once, and what it moves.

    Keys come while attention to those that are there goes on: of what both could do at the same
    time, the hardware's `hide` is done so. Nothing hides what waits for the last to arrive, nor the
    gradients of these that go home after it. Heads are exchanged before and after, and nothing
    hides that.
    """
    step, layout, hardware = placed.step, placed.layout, placed.hardware
    work = _work(placed, window)
    heads = local_heads(step.model.of_window(window), layout.mesh_columns)
    shares = split_heads(heads.query, heads.kv, layout.ulysses).query
    most = max(last - first for first, last in shares)
    pairs, arrivals = step.rows * work.pairs, work.forward.arrivals
    computed = hardware.attention_seconds(pairs, most, heads.dim, backward=backward)
    joined = JOIN_BYTES[backward] * step.rows * work.joined * most * heads.dim
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
    assert algorithm
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


def state_parts(placed: PlacedStep) -> Iterator[StepPart]:
    """Yield what a layer with a state takes forward and backward, and what it moves.

    Nothing hides what moves. The convolution runs again wherever its layer does.
    """
    step, layout, hardware = placed.step, placed.layout, placed.hardware
    sizes = state_sizes(step.model)
    if sizes is None or not step.rows:
        return
    mine, again = sizes.on(layout.mesh_columns), step.attention
    values = split_heads(mine.values, mine.keys, layout.ulysses).query
    most = max(last - first for first, last in values)
    heads, key, chunk = placed.tokens * layout.ulysses * most, mine.key_dim, CHUNK_TOKENS
    width = 2 * chunk + chunk * (key + 2 * mine.value_dim) / key + 3 * mine.value_dim
    one = hardware.product_seconds(heads, key, width, step.element_bytes)
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


FEW = 8
"""Ranks of the longest ring to which a search deals rows out."""
SHARE_TOKENS = 8192
"""Tokens of each of these ranks, where it has that many: enough that keys come in pieces."""
PACKED_WORK = MAX_IMBALANCE - 0.01
"""Work of the busiest rank of a packed row in that of the mean: dealing stops short of the most
that it allows."""
DOCUMENTS = 3
"""Of the row that shows whether an algorithm sends keys only where they are seen."""
DEALT_RING = 64
"""Ranks of the longest ring for which rows of a sample are dealt out: one on 32 ranks takes half a
second."""


@dataclass(frozen=True)
class AttentionWork:
    """What the busiest ranks of one layer compute and send for one row."""

    pairs: float
    """Pairs of query and key."""
    joined: float
    """Queries that are joined with what arriving keys give, as often as they are: the mean over the
    ranks."""
    forward: Cost
    """What one forward sends."""
    backward: Cost
    """What the backward sends, keys that it needs again among it."""

    @property
    def arrivals(self) -> int:
        """In how many steps the keys of other ranks come in the forward."""
        return self.forward.arrivals

    @property
    def home_share(self) -> float:
        """The share of gradients of keys and values, which go home, in what the backward sends of
        both."""
        ways = (self.forward, self.backward)
        there, back = (cost.ring.bytes + cost.gather.bytes for cost in ways)
        return (back - there if back > there else back) / back if back else 0.0


def is_whole(row: Segments, window: int | None) -> bool:
    """Tell whether one document fills a row and all of it is seen, so that closed forms are
    exact."""
    return row.bounds[1:] == (row.length,) and (window is None or window >= row.length)


@lru_cache(maxsize=4096)  # a row of many documents takes half a second on 32 ranks
def attention_of_row(
    algorithm: Algorithm, row: Segments, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the work of a row under an algorithm, exactly. window: the layer's, in keys."""
    if is_whole(row, window):
        return _closed(algorithm, DrawnRows((row,)), heads, element_bytes, None)
    return _dealt(algorithm, row, heads, element_bytes, window)


@lru_cache(maxsize=4096)
def attention_of_sample(
    algorithm: Algorithm,
    sample: DrawnRows,
    heads: Heads,
    element_bytes: int,
    window: int | None,
    *,
    dealt: bool,
) -> AttentionWork:
    """Return the mean work of the rows of a sample by closed forms. dealt: whether a few of them
    are dealt out, and all corrected by as much as closed forms are off for those."""
    closed = _closed(algorithm, sample, heads, element_bytes, window)
    if not dealt or algorithm.ring == 1 or algorithm.ring > DEALT_RING:
        return closed
    few = sample.dealt
    exact = [attention_of_row(algorithm, row, heads, element_bytes, window) for row in few.rows]
    return _corrected(closed, _closed(algorithm, few, heads, element_bytes, window), exact)


def _corrected(
    closed: AttentionWork, of_few: AttentionWork, exact: Sequence[AttentionWork]
) -> AttentionWork:
    """Return what closed forms say of all rows times what they are off by for a few."""

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
    """Return the work of attention over as many chunks of rows, of that over whole ones. brought:
    how often keys come."""
    each = (one.all_to_all for one in (work.forward, work.backward))
    there, back = (one._replace(messages=chunks * one.messages) for one in each)
    return _in_turns(work, there, back, brought, chunks)


def in_groups(
    work: AttentionWork, algorithm: Algorithm, heads: Heads, token_bytes: int, at_once: int
) -> AttentionWork:
    """Return the work of attention that takes heads a group at a time, of that with all at once.

    token_bytes: of one element of all of a rank's tokens. at_once: query heads of a KV head.
    """
    together, turns = in_turns(heads, algorithm.ulysses, at_once)
    share = together * turns / widest_kv(heads, algorithm.ulysses)
    exchanged = _exchanged(heads, algorithm.ulysses, token_bytes, at_once)
    return _in_turns(work, *exchanged, share, turns)


def _in_turns(
    work: AttentionWork, there: Traffic, back: Traffic, share: float, turns: int
) -> AttentionWork:
    """Return the work where keys and values come in so many turns, the share of them in all. there,
    back: what is sent as heads are exchanged."""

    def cost(plain: Cost, heads: Traffic) -> Cost:
        sent = _of_each(round, _times(plain, share, turns))
        return replace(sent, all_to_all=heads, arrivals=turns * plain.arrivals)

    return replace(work, forward=cost(work.forward, there), backward=cost(work.backward, back))


def each_way(cost: Callable[[Forwards], Cost], at_once: int | None = None) -> tuple[Cost, Cost]:
    """Return what a layer sends in one forward, and in its backward.

    cost: what it sends in all, so many forwards among it. at_once: as of Forwards.
    """
    once, again = (cost(Forwards(n, n, at_once)) for n in (1, 2))
    forward = _of_each(sub, again, once)
    return forward, _of_each(sub, once, forward)


KINDS = ("all_to_all", "ring", "gather", "state")


def _of_each(number: Callable[..., Any], *costs: Cost) -> Cost:
    """Return a cost whose every number is what a function makes of those of several costs."""
    every = {kind: [getattr(one, kind) for one in costs] for kind in KINDS}
    made: dict[str, Any] = {kind: Traffic(*map(number, *of)) for kind, of in every.items()}
    return replace(costs[0], **made)


def _times(cost: Cost, of_bytes: float, of_messages: float) -> Cost:
    """Return so many times the bytes of a cost, and its messages; what follows may be no whole
    number."""
    by = Traffic(of_bytes, of_messages)  # type: ignore[arg-type]
    return _of_each(mul, cost, Cost(by, by, by, state=by))


def _closed(
    algorithm: Algorithm, sample: DrawnRows, heads: Heads, element_bytes: int, window: int | None
) -> AttentionWork:
    """Return the mean work of rows, drawn out from that of a few ranks."""
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
    """Return what a rank sends as heads are exchanged, in a forward and in the backward. The
    arguments are those of in_groups; at_once: None for all heads."""
    if ulysses == 1:
        return Traffic(), Traffic()
    there, back = each_way(
        lambda often: Cost(heads_traffic(heads, ulysses, token_bytes, 1, often)), at_once
    )
    return there.all_to_all, back.all_to_all


def _drawn_out(
    algorithm: Algorithm, tokens: int, longest: float | None, window: int | None
) -> AttentionWork:
    """Return the work on the whole ring, but for the pairs, its bytes in keys or values of tokens.

    tokens: of each ring rank. longest: those of a row's longest document; None where that is all of
    the row and all of it is seen.
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
    # A rank's tokens lie in two places at least, each of which sees a window before it.
    seen = longest if window is None else min(longest, 2 * window)
    reach = min(1.0, seen / tokens / (ring - 1))
    packed, there, back = _on_few(small, size, DOCUMENTS), forward, backward
    if _trimmed(one.forward, packed.forward):
        there = _reaching(forward, reach)
        # Under a window no rank sends least back, as that does which ends a document.
        back = _reaching(back if window is None else _of_each(max, forward, back), reach)
    elif _trimmed(*(_of_each(sub, each.backward, each.forward) for each in (one, packed))):
        # Keys go round once more, gradients where keys were seen.
        back = _of_each(add, forward, _reaching(_of_each(sub, backward, forward), reach))
    return replace(one, joined=joined * reach, forward=there, backward=back)


def _reaching(moved: Cost, reach: float) -> Cost:
    """Return what is sent where a part of keys is needed; messages to more ranks are smaller."""
    return _times(moved, reach, min(1.0, 2 * reach))


def _trimmed(one: Cost, packed: Cost) -> bool:
    """Tell whether less is sent of a row of several documents."""
    few, all_of_it = (cost.ring.bytes + cost.gather.bytes for cost in (packed, one))
    return few < 0.9 * all_of_it


def _steps(algorithm: Algorithm, one: AttentionWork) -> int:
    """Return in how many steps keys come, of which a few ranks tell."""
    if stages := getattr(algorithm, "stages", 0):
        return int(stages)
    each = one.arrivals >= FEW - 1 and algorithm.ring > FEW
    return algorithm.ring - 1 if each else one.arrivals


def _smaller(algorithm: Algorithm, ring: int) -> Algorithm:
    """Return the algorithm on a shorter ring, whose hosts are of no account, without exchanges of
    heads."""
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
    """Return the work of a row of equal documents on all ranks of a short ring, its bytes in keys
    or values of tokens.

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
    """Return how many queries of a ring rank are joined with what arrives.

    One that sees keys of another rank is, once in each of the steps in which these come.
    """
    met = 0
    for share in shares:
        others = (blocks for j, blocks in enumerate(share.blocks) if j != share.ring_index)
        met += sum(block.q1 - block.q0 for blocks in others for block in blocks)
    others_met = max(1, len(shares) - 1)
    return met / len(shares) * arrivals / others_met
