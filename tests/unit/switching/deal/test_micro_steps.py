"""The rows of a step: samples by length, packed inside each bucket, none dropped."""

from __future__ import annotations

import random

import pytest

from uspft.switching.deal.micro_steps import BucketRow, rows_of_samples

LENGTHS = {10: 7, 11: 64, 12: 3, 13: 16, 14: 17, 15: 9, 16: 5, 17: 20}


def test_each_bucket_is_packed_by_itself() -> None:
    assert rows_of_samples(LENGTHS, (16, 32, 64), "best_fit") == [
        BucketRow(0, (10, 15)),
        BucketRow(0, (12, 16)),
        BucketRow(0, (13,)),
        BucketRow(1, (14,)),
        BucketRow(1, (17,)),
        BucketRow(2, (11,)),
    ]


def test_without_packing_each_sample_is_a_row() -> None:
    found = rows_of_samples(LENGTHS, (16, 64), "none")
    assert [row.samples for row in found] == [
        (10,),
        (12,),
        (13,),
        (15,),
        (16,),
        (11,),
        (14,),
        (17,),
    ]


def test_every_sample_is_in_one_row_that_holds_it() -> None:
    draw = random.Random(0)
    for _ in range(50):
        bounds = sorted(draw.sample(range(1, 200), 3))
        lengths = {i: draw.randint(1, bounds[-1]) for i in range(draw.randint(0, 80))}
        for packing in ("none", "best_fit"):
            rows = rows_of_samples(lengths, bounds, packing)
            assert sorted(one for row in rows for one in row.samples) == list(lengths)
            for bucket, samples in rows:
                below = bounds[bucket - 1] if bucket else 0
                assert all(below < lengths[one] <= bounds[bucket] for one in samples)
                assert sum(lengths[one] for one in samples) <= bounds[bucket]


def test_a_sample_longer_than_every_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample 11 has 64 tokens, rows at most 32"):
        rows_of_samples(LENGTHS, (16, 32), "best_fit")
