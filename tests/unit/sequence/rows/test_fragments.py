"""Fragments cover a row, chains order them, and what one rank sends is what the other takes."""

from __future__ import annotations

import random
from itertools import pairwise

from uspft.sequence.rows.fragments import NOBODY, chains_of, fragments_of, halo_of
from uspft.sequence.rows.spans import Span


def drawn(seed: int) -> tuple[list[list[Span]], list[Span], int]:
    """(spans by rank, documents, length of the row), at random: gaps between documents, idle ranks,
    pieces of one token."""
    dice = random.Random(seed)
    length, ranks = dice.randint(1, 80), dice.randint(1, 5)
    held: list[list[Span]] = [[] for _ in range(ranks)]
    at = 0
    while at < length:
        stop = min(length, at + dice.choice([1, 1, 2, 3, 9, 20]))
        held[dice.randrange(ranks)].append((at, stop))
        at = stop
    documents, at = [], 0
    while at < length:
        stop = min(length, at + dice.choice([1, 2, 7, 19, 60]))
        if dice.random() < 0.8:
            documents.append((at, stop))
        at = stop
    return held, documents, length


def document_of(position: int, documents: list[Span]) -> int:
    found = [n for n, (start, stop) in enumerate(documents) if start <= position < stop]
    return found[0] if found else NOBODY


def test_fragments_are_a_ranks_tokens_by_document() -> None:
    for seed in range(300):
        held, documents, _ = drawn(seed)
        for spans, mine in zip(held, fragments_of(held, documents), strict=True):
            positions = [p for start, stop in spans for p in range(start, stop)]
            assert [p for f in mine for p in range(f.start, f.stop)] == positions
            for one in mine:
                assert positions[one.own] == list(range(one.start, one.stop))
                assert {document_of(p, documents) for p in positions[one.own]} == {one.document}
            for one, after in pairwise(mine):  # neighbours are joined
                assert (one.stop, one.document) != (after.start, after.document)


def test_a_summary_goes_to_each_rank_that_has_a_later_fragment_and_to_no_other() -> None:
    crossing = 0
    for seed in range(300):
        held, documents, _ = drawn(seed)
        every = [chains_of(held, documents, rank) for rank in range(len(held))]
        pieces = [f for one in every for f in one.mine if f.document != NOBODY]
        for i, sender in enumerate(every):
            for j, taker in enumerate(every):
                later = [f for f in taker.mine if f.document != NOBODY]
                wanted = [
                    f
                    for f in sender.mine
                    if i != j and any(x.document == f.document and x > f for x in later)
                ]
                back = [
                    f
                    for f in sender.mine
                    if i != j and any(x.document == f.document and x < f for x in later)
                ]
                assert list(sender.sends[j]) == list(taker.takes[i]) == wanted
                assert list(sender.sends_back[j]) == list(taker.takes_back[i]) == back
                crossing += bool(wanted)
        for one in every:
            for chain in one.documents:
                assert [f.start for f in chain] == sorted(f.start for f in chain)
                assert chain[0] in one.first and chain[-1] in one.last
                assert set(chain) == {f for f in pieces if f.document == chain[0].document}
        sent = any(any(one.sends) for one in every)
        assert {one.crossing for one in every} == {sent}
    assert crossing > 200


def test_a_convolution_sees_the_tokens_before_each_fragment_of_its_document_alone() -> None:
    arrived = 0
    for seed in range(300):
        held, documents, _ = drawn(seed)
        for taps in (2, 4):
            every = [halo_of(held, documents, rank, taps) for rank in range(len(held))]
            local = [[p for a, b in spans for p in range(a, b)] for spans in held]
            for rank, halo in enumerate(every):
                here: list[int | None] = list(local[rank])
                for other, giver in enumerate(every):
                    come = [local[other][n] for n in giver.gives[rank]]
                    assert len(come) == halo.takes[other]
                    here += come
                    arrived += len(come)
                laid = [*here, None]
                seen = [laid[n] for n in halo.places]
                for token, place in enumerate(halo.own):
                    position = local[rank][token]
                    document = document_of(position, documents)
                    before = range(position - taps + 1, position)
                    wanted = [
                        p if document != NOBODY and p >= documents[document][0] else None
                        for p in before
                    ]
                    got = seen[place - taps + 1 : place]
                    assert seen[place] == position
                    if document != NOBODY:
                        assert got == wanted
            needed = any(len(gives) for halo in every for gives in halo.gives)
            assert {halo.crossing for halo in every} == {needed}
            for spans, halo in zip(held, every, strict=True):
                assert not halo.whole or (
                    not needed and len(fragments_of([spans], documents)[0]) <= 1
                )
    assert arrived > 1000
