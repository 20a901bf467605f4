"""Rows: what a position sees as its target, and which rows come in which order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.data_cases import block, source, write_lengths, write_lines
from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.prepare import prepare
from uspft.data.rows.stream import (
    WINDOW_SAMPLES,
    Packing,
    Row,
    RowStream,
    best_fit,
    exactly,
    pack_rows,
)

VOCABULARY = 1_000_000


def corpus_of(path: Path, **fields: object) -> Corpus:
    cache = path.parent / "cache"
    return Corpus.open(prepare(block(path, **fields), None, VOCABULARY, cache))


def joined(lists: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def slow_row(documents: list[list[int]], labels: list[list[int]], length: int) -> dict[str, object]:
    """A row from lists: each document's labels shifted alone, then laid end to end."""
    ids = joined(documents)
    targets = joined([*one[1:], -100] for one in labels)
    positions = joined(range(len(d)) for d in documents)
    rest = length - len(ids)
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    return {
        "input_ids": ids + [0] * rest,
        "labels": targets + [-100] * rest,
        "positions": positions + [0] * rest,
        "bounds": tuple(bounds),
    }


def shown(row: Row) -> dict[str, object]:
    arrays = {n: getattr(row, n) for n in ("input_ids", "labels", "positions")}
    assert all(a.dtype == np.int64 for a in arrays.values())
    return {**{n: a.tolist() for n, a in arrays.items()}, "bounds": row.segments.bounds}


def test_labels_are_shifted_inside_each_document(tmp_path: Path) -> None:
    documents = [[11, 12, 13], [21, 22], [31, 32, 33, 34]]
    labels = [[11, -100, 13], [21, 22], [-100, -100, 33, 34]]
    records = [{"input_ids": i, "labels": x} for i, x in zip(documents, labels, strict=True)]
    corpus = corpus_of(write_lines(tmp_path / "a.jsonl", records))
    row = RowStream(corpus, 12, "best_fit", False, 0).row(0)
    assert shown(row) == slow_row(documents, labels, 12)
    assert row.samples == (0, 1, 2)
    assert row.segments.length == 12
    # Seen to fail: a shift over the whole row makes 21 the target of 13.
    over_the_row = [*joined(labels)[1:], -100, -100, -100, -100]
    assert row.labels.tolist() != over_the_row
    assert over_the_row[2] == 21 and row.labels[2] == -100


def test_the_first_label_of_a_sample_is_masked_in_the_corpus(tmp_path: Path) -> None:
    corpus = corpus_of(write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}]))
    assert corpus.tokens.tolist() == [5, 6]
    assert corpus.labels.tolist() == [-100, 6]
    assert corpus.tokens.dtype == corpus.labels.dtype == np.int32
    assert not corpus.tokens.flags.writeable


def test_a_split_sample_restarts_in_each_piece(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3, 4, 5, 6, 7]}])
    corpus = corpus_of(path, overlong="split", sequence_length=3)
    stream = RowStream(corpus, 3, "none", False, 0)
    want = [slow_row([d], [d], 3) for d in ([1, 2, 3], [4, 5, 6], [7])]
    assert [shown(stream.row(i)) for i in range(3)] == want
    assert [stream.row(i).samples for i in range(3)] == [(0,)] * 3
    # Where a piece follows another document, that one must not learn to predict its first token.
    records = [{"input_ids": [8, 9]}, {"input_ids": [1, 2, 3, 4, 5, 6, 7]}]
    corpus = corpus_of(write_lines(path, records), overlong="split", sequence_length=5)
    stream = RowStream(corpus, 5, "best_fit", False, 0)
    behind, alone = ([[8, 9], [6, 7]], [[1, 2, 3, 4, 5]])
    assert [shown(stream.row(i)) for i in range(2)] == [slow_row(d, d, 5) for d in (behind, alone)]


def test_rows_in_file_order_epoch_after_epoch(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [3, 3, 3]))
    stream = RowStream(corpus, 4, "none", False, 0)
    assert [stream.row(i).samples[0] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert stream.rows_in(2) == 6
    assert [stream.steps_in_epochs(n, 4) for n in (1, 2, 3)] == [1, 2, 3]
    assert stream.rows_in(0) == 0
    with pytest.raises(IndexError):
        stream.row(-1)


def test_each_epoch_has_every_sample_once_in_its_own_order(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [1 + i % 7 for i in range(50)]))
    stream = RowStream(corpus, 8, "best_fit", True, 3)
    orders, first = [], 0
    for epoch in range(3):
        rows = range(first, first + stream.rows_in_epoch(epoch))
        orders.append([s for i in rows for s in stream.row(i).samples])
        first = rows.stop
        assert sorted(orders[-1]) == list(range(50))
    assert first == stream.rows_in(3)
    assert len({tuple(order) for order in orders}) == 3


def test_the_shuffle_is_the_seeds_alone(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [2] * 6))
    order = [RowStream(corpus, 2, "none", True, 1).row(i).samples[0] for i in range(12)]
    # Written down once: other machines and later versions must give the same.
    assert order == [2, 0, 1, 4, 5, 3, 1, 3, 5, 0, 2, 4]
    other = [RowStream(corpus, 2, "none", True, 2).row(i).samples[0] for i in range(12)]
    assert other != order


def test_random_access_equals_reading_on(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [1 + i % 5 for i in range(23)]))
    forward = RowStream(corpus, 6, "best_fit", True, 9)
    rows = [shown(forward.row(i)) for i in range(60)]
    for index in (59, 0, 31, 59, 7):
        assert shown(RowStream(corpus, 6, "best_fit", True, 9).row(index)) == rows[index]
    assert len(forward.plans) <= 2


def test_a_far_row_is_found_at_once_where_epochs_are_alike(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [1, 2, 3]))
    for packing, shuffle in (("none", True), ("best_fit", False)):
        stream = RowStream(corpus, 3, packing, shuffle, 0)
        stream.row(10**12)
        assert not stream.ends


def test_sources_are_mixed_by_tokens_epoch_by_epoch(tmp_path: Path) -> None:
    small = write_lengths(tmp_path / "small.jsonl", [2] * 3)
    large = write_lengths(tmp_path / "large.jsonl", [1] * 18)
    data = block(source(small, weight=2), source(large, weight=2))
    corpus = Corpus.open(prepare(data, None, VOCABULARY, tmp_path / "cache"))
    # 24 tokens an epoch, 12 of each: the small one twice, two thirds of the large one.
    assert [span.weight for span in corpus.sources] == [2, pytest.approx(2 / 3)]
    for shuffle in (False, True):
        stream = RowStream(corpus, 2, "none", shuffle, 5)
        assert [stream.rows_in_epoch(e) for e in range(3)] == [18] * 3
        epochs = [[stream.row(18 * e + i).samples[0] for i in range(18)] for e in range(3)]
        for epoch in epochs:
            count = Counter(epoch)
            assert [count[i] for i in range(3)] == [2, 2, 2]
            assert sum(count[i] for i in range(3, 21)) == 12
        # The third that was left out comes in the next epoch: three epochs have it all twice.
        assert Counter(i for epoch in epochs for i in epoch if i > 2) == {
            i: 2 for i in range(3, 21)
        }
        again = RowStream(corpus, 2, "none", shuffle, 5)
        assert [again.row(i).samples[0] for i in range(54)] == [i for e in epochs for i in e]


def test_a_row_without_any_target_is_all_masked(tmp_path: Path) -> None:
    records = [{"input_ids": [7, 8], "labels": [-100, -100]}, {"input_ids": [9, 10]}]
    corpus = corpus_of(write_lines(tmp_path / "a.jsonl", records))
    row = RowStream(corpus, 4, "none", False, 0).row(0)
    assert row.labels.tolist() == [-100] * 4
    assert row.segments.bounds == (0, 2)


def test_samples_that_no_rule_cuts_are_refused(tmp_path: Path) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [2, 5]))
    with pytest.raises(ValueError, match=r"a\.jsonl:2"):
        RowStream(corpus, 4, "none", False, 0)
    with pytest.raises(ValueError, match="packing"):
        RowStream(corpus, 8, "first_fit", False, 0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_are_counted_by_the_rows_that_each_has(tmp_path: Path, shuffle: bool) -> None:
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [5, 3, 4, 2, 6, 1, 2, 5] * 3))
    stream = RowStream(corpus, 8, "best_fit", shuffle, 1)
    rows = [stream.rows_in_epoch(epoch) for epoch in range(3)]
    counted = [stream.epochs_after(index) for index in range(sum(rows))]
    want = [epoch + (at + 1) / rows[epoch] for epoch in range(3) for at in range(rows[epoch])]
    assert counted == want and counted[-1] == 3.0


@pytest.mark.parametrize("window", [4, 4096])
def test_parts_of_epochs_end_where_their_last_row_is_trained(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted row by row, where epochs have different numbers of rows and where they do not."""
    monkeypatch.setattr("uspft.data.rows.stream.WINDOW_SAMPLES", window)
    corpus = corpus_of(write_lengths(tmp_path / "a.jsonl", [5, 3, 4, 2, 6, 1, 2, 5] * 4))
    stream = RowStream(corpus, 8, "best_fit", True, 1)
    rows = [stream.rows_in_epoch(epoch) for epoch in range(6)]
    assert (len(set(rows)) > 1) == (window == 4)
    after = [epoch + Fraction(at + 1, n) for epoch, n in enumerate(rows) for at in range(n)]

    def end(epochs: Fraction) -> int:
        """How many rows are trained when so many epochs are."""
        return next(number for number, done in enumerate(after, 1) if done >= epochs)

    for written, exact in ((1.5, "3/2"), (0.1, "1/10"), (1 / 3, "1/3"), (1 / 11, "1/11"), (2, 2)):
        each, wanted, batch = Fraction(exact), set[int](), 5
        for number in range(1, int(5 / each) + 1):
            assert stream.rows_in(number * each) == end(number * each), (written, number)
            wanted.add(-(-end(number * each) // batch))
        steps = stream.steps_in_epochs(5, batch)
        assert stream.steps_of_ends(written, batch, steps) == tuple(sorted(wanted)), written
    assert stream.steps_of_ends(9.0, 5, stream.steps_in_epochs(5, 5)) == ()


def test_a_third_is_a_third() -> None:
    assert exactly(0.3333333333333333) == Fraction(1, 3) and exactly(0.333) == Fraction(333, 1000)
    # Seen to fail: 11 × 0.09090909090909091 is more than one epoch.
    assert 11 * exactly(1 / 11) == 1 < 11 * Fraction(1 / 11)


def test_padding_is_what_no_document_fills(tmp_path: Path) -> None:
    corpus = corpus_of(
        write_lengths(tmp_path / "a.jsonl", [5, 19, 4]), overlong="split", sequence_length=8
    )
    stream = RowStream(corpus, 8, "best_fit", False, 0)
    rows = [stream.row(index) for index in range(stream.rows_in_epoch(0))]
    filled = sum(row.segments.bounds[-1] for row in rows)
    assert filled == 28 and stream.padding() == 1 - 28 / (8 * len(rows))


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The definition, with every row tried for every document."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        left = [capacity - sum(lengths[j] for j in row) for row in rows]
        fits = [i for i in range(len(rows)) if left[i] >= lengths[index]]
        if fits:
            rows[min(fits, key=lambda i: (left[i], i))].append(index)
        else:
            rows.append([index])
    return sorted([sorted(row) for row in rows], key=min)


def rows_of(plan: Packing) -> list[list[tuple[int, int]]]:
    """[(sample, start), …] of each row."""
    documents = list(zip(plan.samples.tolist(), plan.starts.tolist(), strict=True))
    ends = plan.bounds.tolist()
    return [documents[a:b] for a, b in pairwise(ends)]


def planned(lengths: list[int], capacity: int, packing: str = "best_fit") -> Packing:
    order = np.arange(len(lengths))
    return pack_rows(order, np.array(lengths), capacity, packing)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_is_the_definition(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.choice([1, 7, 64, 1000])
    largest = chance.randint(1, capacity)
    lengths = [chance.randint(1, largest) for _ in range(chance.randint(0, 200))]
    rows = best_fit(lengths, capacity)
    assert rows == slow_best_fit(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)


def test_first_fit_and_worst_fit_are_seen_as_different() -> None:
    # Best fit lays the 4 into the 4 that are left of row 1; first and worst fit into row 0's 45.
    assert best_fit([55, 50, 46, 4], 100) == [[0], [1, 2, 3]]


def test_best_fit_is_not_quadratic() -> None:
    lengths = [1 + i % 50 for i in range(100_000)]
    assert len(best_fit(lengths, 50)) >= sum(lengths) // 50


def test_packing_none_is_one_sample_a_row() -> None:
    assert rows_of(planned([3, 1, 2], 4, "none")) == [[(0, 0)], [(1, 0)], [(2, 0)]]


def test_an_overlong_sample_becomes_consecutive_documents() -> None:
    assert rows_of(planned([2, 9, 1], 4, "none")) == [
        [(0, 0)],
        [(1, 0)],
        [(1, 4)],
        [(1, 8)],
        [(2, 0)],
    ]
    # 9 = 4 + 4 + 1: the last piece and the shorter samples share a row.
    assert rows_of(planned([2, 9, 1], 4)) == [[(0, 0), (1, 8), (2, 0)], [(1, 0)], [(1, 4)]]


def test_no_row_spans_two_windows_of_samples() -> None:
    assert WINDOW_SAMPLES == 4096  # the public contract's number
    lengths = [1] * (WINDOW_SAMPLES + 2)
    rows = rows_of(planned(lengths, 2 * WINDOW_SAMPLES))
    assert [len(row) for row in rows] == [WINDOW_SAMPLES, 2]
    # Pieces of an overlong sample do not count as samples: the window is still 4,096 of them.
    lengths[0] = 3 * 2 * WINDOW_SAMPLES
    rows = rows_of(planned(lengths, 2 * WINDOW_SAMPLES))
    assert [len(row) for row in rows] == [1, 1, 1, WINDOW_SAMPLES - 1, 2]


def test_rows_and_their_documents_keep_the_order_given() -> None:
    order = np.array([5, 3, 9])
    plan = pack_rows(order, np.array([2, 4, 2]), 4, "best_fit")
    assert rows_of(plan) == [[(5, 0), (9, 0)], [(3, 0)]]
