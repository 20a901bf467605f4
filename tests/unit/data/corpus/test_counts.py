"""How much is taken of each source, and how often an epoch takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data_cases import block, faults_of, source, write_lengths, write_lines
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.counts import mix_lines, mixed
from uspft.data.corpus.prepare import prepare


def test_shares_are_of_tokens() -> None:
    sources = tuple(source(name, weight=weight) for name, weight in (("a", 3), ("b", 1)))
    times = mixed(sources, [100, 300])
    # 400 tokens an epoch: three quarters of them from the source that has a quarter.
    assert times == pytest.approx([3, 1 / 3])
    assert mix_lines(sources, [100, 300], times) == [
        "a: 75.0% of an epoch, 100 tokens × 3",
        "b: 25.0% of an epoch, 300 tokens × 0.3333",
    ]
    plain = tuple(source(name) for name in "ab")
    assert mixed(plain, [100, 300]) == [1, 1]
    assert mix_lines(plain, [100, 300], [1, 1])[1] == "b: 75.0% of an epoch, 300 tokens × 1"
    assert mixed((source("a", weight=5),), [7]) == [1]
    assert mix_lines((source("a", weight=5),), [7], [1]) == []
    # A source without samples takes no share of the others'.
    assert mixed(sources, [0, 300]) == [0, 1]


def test_a_source_may_be_taken_in_part(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "a.jsonl", [5, 4, 3, 2, 1])
    for limits, lengths in (
        ({"max_samples": 2}, [5, 4]),
        ({"max_tokens": 12}, [5, 4, 3]),
        ({"max_tokens": 11}, [5, 4]),
        ({"max_tokens": 12, "max_samples": 9}, [5, 4, 3]),
    ):
        data = block(source(path, **limits), source(path))
        folder = prepare(data, None, 10_000, tmp_path / "cache")
        corpus = Corpus.open(folder)
        assert corpus.lengths.tolist() == [*lengths, 5, 4, 3, 2, 1], limits
        assert read_report(folder)["read"] == len(corpus)
    # A sample that is dropped does not end its source: seen to fail.
    dropping = block(source(path, max_tokens=6), overlong="drop", sequence_length=3)
    folder = prepare(dropping, None, 10_000, tmp_path / "cache")
    assert Corpus.open(folder).lengths.tolist() == [3, 2, 1]
    few = block(source(path, max_tokens=4))
    (line,) = faults_of(tmp_path, few, None, 10_000)
    assert line.startswith("data.train.max_tokens: is 4, and the first sample has 5 tokens; ")


def test_what_comes_after_a_limit_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uspft.data.corpus.workers.BATCH_RECORDS", 2)
    good = {"input_ids": [1, 2]}
    path = write_lines(tmp_path / "a.jsonl", [good, good, "{", *[good] * 50, "{"])
    other = write_lengths(tmp_path / "b.jsonl", [1])
    for workers in (1, 4):
        data = block(source(path, max_samples=2), other, workers=workers)
        corpus = Corpus.open(prepare(data, None, 10_000, tmp_path / f"cache{workers}"))
        assert corpus.lengths.tolist() == [2, 2, 1]
    (line,) = faults_of(tmp_path, block(source(path, max_samples=3)), None, 10)
    assert line.startswith(f"{path}:3: broken JSON")
