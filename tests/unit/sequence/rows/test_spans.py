"""Blocks cover exactly the pairs that the mask lets through, each once, for any split of a row."""

from __future__ import annotations

import random

import torch

from uspft.kernels.plain import SEEN
from uspft.sequence.rows.spans import Holding, blocks_between, work_of


def random_split(length: int, ranks: int, dice: random.Random) -> list[Holding]:
    """Runs of random lengths dealt to random ranks."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    at = 0
    while at < length:
        stop = min(length, at + dice.randint(1, 9))
        runs[dice.randrange(ranks)].append((at, stop))
        at = stop
    return [Holding(dice.sample(held, len(held))) for held in runs]


def random_documents(length: int, dice: random.Random) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < length:
        stop = min(length, at + dice.choice([1, 2, 7, 19, 60]))
        if dice.random() < 0.9:  # else a gap: padding
            found.append((at, stop))
        at = stop
    return found


def test_every_visible_pair_is_in_one_block_and_no_other() -> None:
    dice = random.Random(0)
    for _ in range(300):
        length, window = dice.randint(5, 70), dice.choice([None, None, 1, 2, 5, 16, 100])
        documents = random_documents(length, dice)
        seen = torch.zeros(length, length, dtype=torch.int)
        shares = random_split(length, dice.randint(1, 4), dice)
        positions = [[p for a, b in share.spans for p in range(a, b)] for share in shares]
        for i, queries in enumerate(shares):
            work = 0
            for j, keys in enumerate(shares):
                for block in blocks_between(queries, keys, documents, window):
                    assert block.q0 < block.q1 and block.k0 < block.k1
                    shape = (block.q1 - block.q0, block.k1 - block.k0)
                    mask = SEEN[block.mask](torch.ones(shape, dtype=torch.int))
                    assert mask.any(dim=1).all()
                    assert mask.sum() == block.area
                    rows = torch.tensor(positions[i][block.q0 : block.q1])
                    columns = torch.tensor(positions[j][block.k0 : block.k1])
                    seen[rows[:, None], columns[None]] += mask
                    work += block.area
            assert work == work_of(queries.spans, documents, window)
        want = torch.zeros_like(seen)
        for a, b in documents:
            for p in range(a, b):
                want[p, max(a, p - (window or length) + 1) : p + 1] = 1
        assert torch.equal(seen, want)


def test_keys_may_be_more_than_the_queries_own() -> None:
    """A rank's queries of a chunk, and its keys of that and of earlier ones."""
    dice = random.Random(0)
    for _ in range(100):
        length, window = dice.randint(5, 70), dice.choice([None, 1, 2, 5, 16, 100])
        documents = random_documents(length, dice)
        keys, *_ = random_split(length, 2, dice)
        start = dice.randrange(length)
        queries = Holding(keys.within(start, length))
        seen = torch.zeros(length, length, dtype=torch.int)
        rows, columns = (
            torch.tensor([p for a, b in one.spans for p in range(a, b)]) for one in (queries, keys)
        )
        for block in blocks_between(queries, keys, documents, window, own=True):
            shape = (block.q1 - block.q0, block.k1 - block.k0)
            mask = SEEN[block.mask](torch.ones(shape, dtype=torch.int))
            seen[rows[block.q0 : block.q1, None], columns[None, block.k0 : block.k1]] += mask
        want = torch.zeros_like(seen)
        held = set(columns.tolist())
        for a, b in documents:
            for p in set(range(a, b)) & set(rows.tolist()):
                for k in held & set(range(max(a, p - (window or length) + 1), p + 1)):
                    want[p, k] = 1
        assert torch.equal(seen, want)


def test_zigzag_needs_one_block_a_step() -> None:
    chunk = 8
    shares = [
        Holding([(i * chunk, (i + 1) * chunk), ((7 - i) * chunk, (8 - i) * chunk)])
        for i in range(4)
    ]
    table = [[blocks_between(q, k, [(0, 64)], None) for k in shares] for q in shares]
    assert all(len(blocks) == 1 for line in table for blocks in line)
    assert len({sum(block.area for blocks in line for block in blocks) for line in table}) == 1
