"""What algorithms send, in closed form: the tables of the papers, and what masks save; and what
layers with a state send, which tests/parity/test_linear.py holds to the books."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.support.algorithms import named
from tests.support.rows import packed
from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence import FORWARDS, Cost, Heads, Share, Traffic
from uspft.sequence.chunked import Chunked, Cut
from uspft.sequence.exchange import Exchange
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.traffic import state_cost

ROW, DIM, BYTES = 1 << 14, 16, 2
LLAMA_8B, QWEN_7B, LLAMA_70B = Heads(32, 8, DIM), Heads(28, 4, DIM), Heads(64, 8, DIM)


def units(byte_count: int, heads: Heads, ranks: int) -> Fraction:
    """Bytes in units of one rank's own keys and values."""
    return Fraction(byte_count * ranks, 2 * heads.kv * heads.dim * ROW * BYTES)


def sent(name: str, heads: Heads, ulysses: int, ring: int) -> Fraction:
    """By the busiest rank of one document's row, all kinds together."""
    cost = named(name, ulysses, ring).cost(Segments.single(ROW), heads, BYTES)
    total = cost.all_to_all.bytes + cost.ring.bytes + cost.gather.bytes
    return units(total, heads, ulysses * ring)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ring_and_all_gather_send_three_times_what_every_other_rank_holds(ranks: int) -> None:
    row = Segments.single(48 * ranks)
    for name, kind in (("ring_cp", "ring"), ("allgather_cp", "gather")):
        traffic = getattr(named(name, 1, ranks).cost(row, LLAMA_8B, BYTES), kind)
        unit = 2 * LLAMA_8B.kv * DIM * 48 * BYTES
        assert traffic == (3 * (ranks - 1) * unit, 3 * (ranks - 1))
        # Table 2 of USP has 4 tensors of the row for large N, keys and values there and back; the
        # gradients' way home makes them 6, for the row's KV heads.
        tensor = row.length * LLAMA_8B.kv * DIM * BYTES
        assert traffic.bytes == Fraction(ranks - 1, ranks) * 6 * tensor


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_chunks_of_one_document_bring_keys_half_as_often_as_chunks_and_one(chunks: int) -> None:
    """(s + 1) / 2 times the bytes of the whole row, where chunks have equal tokens."""
    row, cut = Segments.single(48 * 4 * 8), Cut(chunks, 8)
    for name, kind in (("ring_cp", "ring"), ("allgather_cp", "gather")):
        whole = named(name, 1, 4).cost(row, LLAMA_8B, BYTES)
        found = Chunked(named(name, 1, 4), cut).cost(row, LLAMA_8B, BYTES)
        once, more = getattr(whole, kind), getattr(found, kind)
        assert more == (Fraction(chunks + 1, 2) * once.bytes, chunks * once.messages)
        assert found.arrivals == chunks * whole.arrivals
    # Documents that end with their chunk are asked for once; what is needed goes as often.
    apart = packed([row.length // chunks] * chunks)
    ring = Chunked(named("ring_cp", 1, 4), cut).cost(apart, LLAMA_8B, BYTES).ring
    assert ring.bytes == named("ring_cp", 1, 4).cost(row, LLAMA_8B, BYTES).ring.bytes
    heads = Chunked(named("ulysses_cp", 4, 1), cut).cost(row, LLAMA_8B, BYTES).all_to_all
    once = named("ulysses_cp", 4, 1).cost(row, LLAMA_8B, BYTES).all_to_all
    assert heads == (once.bytes, chunks * once.messages)


@pytest.mark.parametrize(("heads", "ulysses"), [(LLAMA_8B, 8), (LLAMA_70B, 8), (Heads(8, 8, 4), 4)])
def test_ulysses_sends_eight_tensors(heads: Heads, ulysses: int) -> None:
    """Eight all-to-alls of the paper's Table 2: 8 / N of a tensor where heads are not grouped."""
    groups = Fraction(heads.query, heads.kv)
    others = Fraction(ulysses - 1, ulysses)
    cost = named("ulysses_cp", ulysses, 1).cost(Segments.single(ROW), heads, BYTES)
    assert cost.all_to_all.messages == 4 * (ulysses - 1)
    assert units(cost.all_to_all.bytes, heads, ulysses) == 2 * others * (groups + 1)
    if groups == 1:
        tensor = ROW * heads.query * heads.dim * BYTES
        assert cost.all_to_all.bytes == others * 8 * tensor / ulysses


def test_what_is_made_again_is_sent_again() -> None:
    """Heads that divide go there and back in equal parts, keys of a ring travel twice before their
    gradients, and keys that are kept are fetched once in each forward."""
    row, four = Segments.single(ROW), {"heads": LLAMA_8B, "element_bytes": BYTES}

    def cost(name: str, ulysses: int, ring: int, again: str, **options: bool) -> Cost:
        made = named(name, ulysses, ring, **options)
        return made.cost(row, **four, forwards=FORWARDS[again])

    def times(traffic: Traffic, factor: Fraction) -> tuple[Fraction, Fraction]:
        return traffic.bytes * factor, traffic.messages * factor

    for again, of_heads, of_keys in (("exchange", "3/2", "1"), ("attention", "3/2", "4/3")):
        once, more = (cost("hybrid_cp", 2, 4, one) for one in ("nothing", again))
        assert more.all_to_all == times(once.all_to_all, Fraction(of_heads))
        assert more.ring == times(once.ring, Fraction(of_keys)) and more.arrivals == once.arrivals
    once, more = (cost("allgather_cp", 1, 4, one) for one in ("nothing", "attention"))
    assert more.gather == times(once.gather, Fraction("4/3"))
    once, more = (cost("planned_cp", 1, 4, one, keep=True) for one in ("nothing", "attention"))
    assert once.gather.bytes < more.gather.bytes < 2 * once.gather.bytes


def test_replicated_heads_are_sent_once_to_each_that_needs_them() -> None:
    # 8 query and 2 KV heads on 4 ranks: 2 query heads and one KV head each (9 units, as measured
    # with other engines), not 2 KV heads each.
    assert sent("ulysses_cp", Heads(8, 2, DIM), 4, 1) == 9


@pytest.mark.parametrize(
    ("heads", "ulysses", "ring", "hybrid", "planned"),
    [
        (LLAMA_8B, 8, 1, "8.75", "8.75"),
        (LLAMA_8B, 4, 2, "10.5", "9.75"),
        (LLAMA_8B, 2, 4, "14", "11.75"),
        (LLAMA_8B, 1, 8, "21", "15.75"),
        (QWEN_7B, 4, 2, "15", "14.25"),
        (QWEN_7B, 2, 4, "17", "14.75"),
        (LLAMA_70B, 8, 1, "15.75", "15.75"),
        (LLAMA_70B, 4, 2, "16.5", "15.75"),
        (LLAMA_70B, 2, 4, "18", "15.75"),
        (Heads(8, 2, DIM), 4, 2, "15", "13.5"),  # every KV head is with two Ulysses ranks
    ],
)
def test_the_hybrid_adds_up(
    heads: Heads, ulysses: int, ring: int, hybrid: str, planned: str
) -> None:
    """By the busiest rank; of the planned exchange, keys fetched twice, by the mean."""
    assert sent("hybrid_cp", heads, ulysses, ring) == Fraction(hybrid)
    row = Segments.single(ROW)
    order = balanced(row, ulysses, ring, fetches=2)
    plans = [Share([row], [order], (ulysses, i * ulysses)) for i in range(ring)]
    tokens = sum(sum(Exchange(p, ring, trimmed=True, keep=False).sent()) for p in plans)
    copies = max(1, Fraction(ulysses, heads.kv))  # of a KV head, on so many Ulysses ranks
    exchanged = copies * Fraction(tokens, ROW)
    heads_moved = named("planned_cp", ulysses, ring).cost(row, heads, BYTES).all_to_all.bytes
    assert units(heads_moved, heads, ulysses * ring) + exchanged == Fraction(planned)


@pytest.mark.parametrize(("keep", "share"), [(True, "1.5"), (False, "2.25")])
@pytest.mark.parametrize("ring", [2, 4, 8])
def test_the_planned_exchange_sends_half_or_three_quarters_of_a_ring(
    ring: int, keep: bool, share: str
) -> None:
    row = Segments.single(ROW)
    order = balanced(row, 1, ring)
    plans = [Share([row], [order], (1, i)) for i in range(ring)]
    tokens = [sum(Exchange(plan, ring, trimmed=True, keep=keep).sent()) for plan in plans]
    assert Fraction(sum(tokens), ROW) == Fraction(share) * (ring - 1)


@pytest.mark.parametrize(("keep", "hop"), [(True, "1.5"), (False, "2.5")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_planned_exchange_costs_its_busiest_rank_so_much_a_hop(
    ranks: int, keep: bool, hop: str
) -> None:
    """Rank i, with chunks i and 2N − 1 − i, sends N − 1 + i chunks of keys and 2N − 2 − i chunks of
    gradients: 3 · (N − 1), whoever it is; keys twice are 5 · (N − 1) of the last rank."""
    tokens = 96
    row = Segments.single(2 * tokens * ranks)
    cost = named("planned_cp", 1, ranks, keep=keep).cost(row, LLAMA_8B, BYTES)
    pair = 2 * LLAMA_8B.kv * DIM * BYTES
    assert Fraction(cost.gather.bytes, 2 * tokens * pair) == Fraction(hop) * (ranks - 1)
    assert cost.all_to_all.bytes == cost.ring.bytes == 0


@pytest.mark.parametrize("name", ["ring_cp", "hybrid_cp", "planned_cp"])
def test_documents_that_fit_a_rank_do_not_travel(name: str) -> None:
    algorithm, row = named(name, 1, 4), packed([ROW // 4] * 4)
    cost = algorithm.cost(row, LLAMA_8B, BYTES)
    assert cost.ring == cost.gather == (0, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_with_a_window_traffic_does_not_grow_with_the_row(keep: bool) -> None:
    window, seen = 100, []
    for row in (1 << 12, 1 << 14, 1 << 16):
        algorithm = named("planned_cp", 1, 8, keep=keep, window=window)
        cost = algorithm.cost(Segments.single(row), LLAMA_8B, BYTES, window)
        seen.append(cost.gather.bytes)
    token = 2 * LLAMA_8B.kv * DIM * BYTES
    # One piece of the row a rank: keys of one window's tail out, their gradients home.
    assert seen == [(window - 1) * token * (2 if keep else 3)] * 3


def test_a_window_narrows_the_ring_to_neighbours() -> None:
    row = Segments.single(ROW)
    full, narrow = (
        named("ring_cp", 1, 8, window=window).cost(row, LLAMA_8B, BYTES, window).ring
        for window in (None, 100)
    )
    assert narrow.messages == 3 and full.messages == 21


def test_the_order_of_chunks_heeds_which_ranks_share_a_host() -> None:
    """2 hosts × 2 ranks: what the busier direction between them carries, blind and heeding."""

    def crossing(row: Segments, per_host: int | None) -> int:
        order = balanced(row, 1, 4, per_host=per_host)
        assert sorted(map(sorted, order)) == sorted(map(sorted, balanced(row, 1, 4)))
        plan = Share([row], [order], (1, 0))
        ways = [((0, 1), (2, 3)), ((2, 3), (0, 1))]
        return max(
            sum(b - a for i in to for j in sources for a, b in plan.seen(i, j))
            for sources, to in ways
        )

    mixes = [packed([9000, 4000, 2000, 1000, 384]), packed([3001, 2503, 6301, 887, 3331, 101, 260])]
    blind, heeding = (
        [crossing(row, per_host) for row in [Segments.single(ROW), *mixes]]
        for per_host in (None, 2)
    )
    assert blind[0] == ROW and heeding[0] == 3 * ROW // 4  # one document: 8 chunks against 6
    assert all(new <= old for new, old in zip(heeding, blind, strict=True))


NINE = StateSizes(16, 32, 128, 128)
"""Qwen3.5-9B's."""
SUMMARY = 32 * 128 * 128 * 4
"""The bytes of a state, and of what passes one on."""


def dealt(name: str, ulysses: int, ring: int, row: Segments) -> list[tuple[tuple[int, int], ...]]:
    return named(name, ulysses, ring).token_order(row)


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
def test_states_cost_the_same_at_every_length(ring: int) -> None:
    """In zigzag order the last rank but one has most: two spans, one of which goes to all others
    each way, and the other to all but one."""
    found = []
    for tokens in (32768, 1 << 20):
        row = Segments.single(tokens)
        cost = state_cost(row, dealt("ring_cp", 1, ring, row), 1, NINE, 2)
        halo = 8192 * 2 * 3
        summaries = (4 * (ring - 1) - 2) * 2 * SUMMARY
        assert summaries < cost.state.bytes <= summaries + 8 * halo
        assert cost.all_to_all.bytes == 0
        found.append(cost.state)
    assert found[0] == found[1]


def test_heads_cost_by_the_token() -> None:
    """All but its own part of q, k, v, both gates and out, there and back."""
    row = Segments.single(32768)
    cost = state_cost(row, dealt("ulysses_cp", 8, 1, row), 8, NINE, 2)
    token = (2 * 16 * 128 + 2 * 32 * 128) * 2 + 32 * (4 + 2)
    assert cost.all_to_all.bytes == 2 * 7 / 8 * (32768 / 8) * token
    again = state_cost(row, dealt("ulysses_cp", 8, 1, row), 8, NINE, 2, FORWARDS["exchange"])
    assert again.all_to_all.bytes == 1.5 * cost.all_to_all.bytes
    assert again.state == cost.state


def test_documents_whole_on_a_rank_send_nothing() -> None:
    row = Segments((0, 512, 1024), 1024)
    cost = state_cost(row, [((0, 512),), ((512, 1024),)], 1, NINE, 2)
    assert cost.state == (0, 0)


@pytest.mark.parametrize(("tokens", "ranks"), [(1024, 2), (1536, 3)])
def test_a_rank_sends_a_state_to_later_fragments_alone(tokens: int, ranks: int) -> None:
    """And its gradient to earlier ones alone: of a document in order on its ranks, each sends one
    message to each other rank, forward or backward."""
    order = [((512 * rank, 512 * rank + 512),) for rank in range(ranks)]
    cost = state_cost(Segments.single(tokens), order, 1, NINE._replace(taps=1), 2)
    assert cost.state.messages == ranks - 1


def test_both_at_once_share_the_heads_of_a_state() -> None:
    row = Segments.single(32768)
    one = state_cost(row, dealt("ring_cp", 1, 4, row), 1, NINE._replace(taps=1), 2)
    both = state_cost(row, dealt("hybrid_cp", 2, 4, row), 2, NINE._replace(taps=1), 2)
    assert both.state.bytes * 2 == one.state.bytes
    assert both.state.messages == one.state.messages
