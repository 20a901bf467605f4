"""A share of the samples is evaluated on and not trained on, the same for a seed everywhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.data_cases import block, source, write_lengths, write_lines
from uspft.data import Corpus, DataError, hold_out, kept_and_dropped, prepare, read_report


def recipe(*sources: Any, fraction: float = 0.25, seed: int = 1) -> Any:
    data = block(*sources, eval_fraction=fraction, sequence_length=8, overlong="split")
    return SimpleNamespace(data=data, seed=seed)


def ids_of(corpus: Corpus) -> list[int]:
    """The samples by their first token, which is a thousand times their number."""
    return [int(corpus.sample(i).ids[0]) // 1000 for i in range(len(corpus))]


def test_samples_are_trained_on_or_held_out(tmp_path: Path) -> None:
    lengths = [1 + i % 11 for i in range(30)]
    one = write_lengths(tmp_path / "a.jsonl", lengths[:10])
    other = write_lines(
        tmp_path / "b.jsonl",
        ({"input_ids": [1000 * (i + 1) + t for t in range(lengths[i])]} for i in range(10, 30)),
    )
    asked = recipe(source(one, weight=1), source(other, weight=3))
    whole = prepare(asked.data, None, 50_000, tmp_path / "cache")
    places = hold_out(whole, asked)
    trained, held = map(Corpus.open, places)
    assert len(held) == round(0.25 * 30) and len(trained) == 30 - len(held)
    assert sorted(ids_of(trained) + ids_of(held)) == list(range(1, 31))
    assert ids_of(held) == sorted(ids_of(held)) and ids_of(trained) == sorted(ids_of(trained))
    for corpus, place in zip((trained, held), places, strict=True):
        for index, number in enumerate(ids_of(corpus)):
            sample = corpus.sample(index)
            assert sample.ids.tolist() == list(
                range(1000 * number, 1000 * number + len(sample.ids))
            )
            assert sample.labels.tolist() == [-100, *sample.ids.tolist()[1:]]
            file, line = (one, number) if number <= 10 else (other, number - 10)
            assert corpus.origin(index) == f"{file}:{line}"
        first, last = corpus.sources
        assert (first.first, first.stop, last.stop) == (0, last.first, len(corpus))
        assert all(number <= 10 for number in ids_of(corpus)[: first.stop])
        tokens = [
            sum(len(corpus.sample(i).ids) for i in range(span.first, span.stop))
            for span in corpus.sources
        ]
        assert 3 * first.weight * tokens[0] == pytest.approx(last.weight * tokens[1])
        assert first.weight * tokens[0] + last.weight * tokens[1] == pytest.approx(sum(tokens))
        report = read_report(place)
        assert report["samples"] == len(corpus) and report["tokens"] == len(corpus.tokens)
    assert kept_and_dropped(read_report(whole)) is None
    lost = {"read": 30, "kept": len(trained), "dropped": {"held out": len(held)}}
    assert kept_and_dropped(read_report(places[0])) == lost
    counts = [read_report(place)["target_tokens"] for place in (whole, *places)]
    assert counts[0] == counts[1] + counts[2]
    names = {Corpus.open(folder).contents for folder in (whole, *places)}
    assert len(names) == 3 and hold_out(whole, asked) == places
    again = hold_out(whole, recipe(*asked.data.train, seed=2))
    assert ids_of(Corpus.open(again[1])) != ids_of(held)


def test_what_is_trained_on_tells_of_all_that_was_read(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (3 + 9 * (i == 5))} for i in range(9)]
    path = write_lines(tmp_path / "a.jsonl", [*rows, {"input_ids": ["a"]}])
    other = write_lengths(tmp_path / "b.jsonl", [3] * 4)
    asked = recipe(source(path, weight=1), source(other, weight=1))
    asked.data.overlong, asked.data.on_bad_sample = "drop", "skip"
    whole = prepare(asked.data, None, 50_000, tmp_path / "cache")
    told = read_report(whole)
    assert len(told["notes"]) == 2 and len(told["skipped"]) == 2
    trained, held = map(read_report, hold_out(whole, asked))
    assert all(trained[name] == told[name] for name in ("notes", "skipped", "shapes", "bad"))
    assert kept_and_dropped(trained) == {
        "read": 14,
        "kept": 9,
        "dropped": {"longer than a row": 1, "cannot be used": 1, "held out": 3},
    }
    assert [line.partition(" of an")[0] for line in trained["mix"]] == [
        f"{path}: 50.0%",
        f"{other}: 50.0%",
    ]
    assert held["notes"] == [] and not {"mix", "skipped"} & held.keys()


def test_a_fraction_that_leaves_a_side_empty(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "a.jsonl", [3, 3, 3])
    for fraction, count in ((0.1, 0), (0.9, 3)):
        asked = recipe(path, fraction=fraction)
        folder = prepare(asked.data, None, 50_000, tmp_path / "cache")
        with pytest.raises(DataError) as caught:
            hold_out(folder, asked)
        (line,) = caught.value.lines
        told = f"data.eval_fraction: is {fraction}, which of 3 samples holds out {count}; "
        assert line.startswith(told)
    masked = {"input_ids": [1, 2], "labels": [-100, -100]}
    mixed = write_lines(tmp_path / "b.jsonl", [masked, {"input_ids": [1, 2]}])
    asked = recipe(mixed, fraction=0.5)
    with pytest.raises(DataError, match="leaves 1 samples without a trained token on one side"):
        hold_out(prepare(asked.data, None, 50_000, tmp_path / "cache"), asked)
