"""A share of the samples is evaluated on and not trained on, the same for a seed everywhere; a
look at the first records tells their shape and what is wrong, and what it left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.data_cases import CHAT, TOKENIZER, block, source, write_lengths, write_lines
from uspft.config.inputs import DataBlock
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.counts import kept_and_dropped
from uspft.data.corpus.prepare import RECORDS, first_look, hold_out, prepare
from uspft.data.faults import DataError
from uspft.data.files.sources import STDLIB


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
        if corpus is held:  # each once; seen to fail where some came twice and others never
            assert (first.weight, last.weight) == (1, 1)
        else:
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
    assert [line.partition(" of an")[0] for line in trained["mix"][:2]] == [
        f"{path}: 50.0%",
        f"{other}: 50.0%",
    ]
    assert held["notes"] == [] and not {"mix", "skipped"} & held.keys()


def test_samples_that_are_held_out_and_trained_on_are_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, i % 6]} for i in range(12)])
    asked = recipe(source(path))
    places = hold_out(prepare(asked.data, None, 10, tmp_path / "cache"), asked)
    trained, held = (
        [c.sample(i).ids.tolist() for i in range(len(c))] for c in map(Corpus.open, places)
    )
    twice = sum(one in trained for one in held)
    told = read_report(places[0])["mix"]
    assert twice and told[-1].startswith(f"{twice} of 3 held-out samples are trained on too")


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


# The first look.

TEXT = {"text": "hi"}


def of_files(*train: Any, **more: Any) -> DataBlock:
    return DataBlock(train=[str(path) for path in train], sequence_length=4096, **more)


def test_the_first_records_of_each_file_are_looked_at(tmp_path: Path) -> None:
    chat = write_lines(tmp_path / "a.jsonl", [CHAT] * RECORDS)
    long = write_lines(tmp_path / "b.jsonl", [*[TEXT] * RECORDS, TEXT, "{"])
    data = of_files(chat, STDLIB, "org/name", eval=str(long))
    look = first_look(data, str(TOKENIZER), 8192)
    assert look.shapes == [f"{chat}: chat: messages with role/content", f"{long}: text"]
    assert look.not_read == [f"data: records after the first {RECORDS} of 1 file"]
    for tokenizer, size in ((None, 8192), (str(TOKENIZER), None)):
        unknown = "data: tokens of the records (no tokenizer or vocabulary here)"
        assert first_look(data, tokenizer, size).not_read[1:] == [unknown]
    pair = write_lines(tmp_path / "p.jsonl", [{"question": "a", "answer": "b"}])
    assert first_look(of_files(pair), None, None).shapes == [
        f"{pair}: question and answer: question, answer"
    ]
    (hint,) = first_look(of_files(pair, chat), None, None).notes
    assert hint.endswith("as plain text; data.format: messages puts them into the template too")
    tokenized = write_lines(tmp_path / "c.jsonl", [{"input_ids": [1, 2]}])
    assert first_look(of_files(tokenized), None, 10).not_read == []
    assert first_look(of_files(STDLIB), None, 10).not_read == []


def test_what_is_wrong_there_is_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT, "{", {"messages": [{"role": "x"}]}, "{"])
    deaf = tmp_path / "deaf.jinja"
    deaf.write_text("{{ messages | length }}")
    for tokenizer in (None, str(TOKENIZER)):
        data = of_files(path, chat_template=str(deaf) if tokenizer else None)
        with pytest.raises(DataError) as caught:
            first_look(data, tokenizer, 8192)
        template, *lines = caught.value.lines if tokenizer else ["", *caught.value.lines]
        assert "no {% generation %} marks, and it does not write" in template or not tokenizer
        assert lines[0].startswith(f"{path}:2: broken JSON (") and "lines 2, 4" in lines[0]
        assert lines[1].startswith(f"{path}:3: messages[0] has no content")
    skipping = of_files(path, on_bad_sample="skip")
    shape, broken, content = first_look(skipping, str(TOKENIZER), 8192).shapes
    assert shape.startswith(f"{path}: chat: messages") and f"{path}:2: " in broken and content
    with pytest.raises(DataError, match=r"the tokenizer has 8,192 tokens"):
        first_look(skipping, str(TOKENIZER), 50)


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty": ([], {}, "a.jsonl: holds no sample; give it data, or leave it out"),
    "empty and skipped": (
        [],
        {"on_bad_sample": "skip"},
        "no sample is left, 1 skipped of 1 read; mend the records",
    ),
    "masked": ([{"input_ids": [5, 6], "labels": [5, -100]}], {}, "no token of any sample is"),
    "dropped": ([{"input_ids": [5] * 33}], {"overlong": "drop"}, "1 dropped of 1 read; write a la"),
    "long": (
        [{"input_ids": [5] * 33}],
        {},
        "a.jsonl:1: 33 tokens, a row has 32; set data.overlong",
    ),
    "without answers": ([{"input_ids": [5, 6]}], {"train_on": "last"}, "data has no answers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_would_refuse_is_refused(tmp_path: Path, case: str) -> None:
    records, changes, what = REFUSED[case]
    bad = write_lines(tmp_path / "a.jsonl", records)
    good = write_lines(tmp_path / "b.jsonl", [{"messages": CHAT["messages"]}])
    key = "data.train_on" if "train_on" in changes else "data.eval[1]"
    for sets in ({"train": str(bad)}, {"train": str(good), "eval": [str(good), str(bad)]}):
        data = DataBlock(**{"sequence_length": 32, **changes, **sets})
        with pytest.raises(DataError) as caught:
            first_look(data, str(TOKENIZER), 8192)
        *_, line = caught.value.lines
        assert what in line
        by_file = case in ("long", "empty")
        assert ("eval" not in sets or by_file) or line.startswith(f"{key}: ")


def test_where_all_are_skipped_the_reasons_are_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{}}", {"text": 3}])
    with pytest.raises(DataError) as caught:
        first_look(of_files(path, on_bad_sample="skip"), str(TOKENIZER), 8192)
    broken, number, line = caught.value.lines
    assert broken.startswith(f"{path}:1: broken JSON (") and ":2: text is a number" in number
    assert line.endswith("no sample is left, 2 skipped of 2 read; mend the records")


def test_what_was_not_seen_whole_is_let_through(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "a.jsonl", [])
    long = write_lines(tmp_path / "b.jsonl", [{"input_ids": [5], "labels": [-100]}] * 101)
    one = write_lines(tmp_path / "c.jsonl", [{"input_ids": [5, 6]}])
    for train in ((empty, long), (empty, STDLIB), (empty, "org/name"), (empty, one)):
        given = of_files(*train, train_on="completion", on_bad_sample="skip")
        (skipped,) = [line for line in first_look(given, None, 10).shapes if "no sample" in line]
        assert skipped == f"{empty}: holds no sample; give it data, or leave it out"
        with pytest.raises(DataError, match=r"a\.jsonl: holds no sample; give it data"):
            first_look(of_files(*train), None, 10)


def test_fields_of_samples_that_are_skipped_are_not_told(tmp_path: Path) -> None:
    """As the report does not tell them, which is made of what trains."""
    beyond = {"input_ids": [99, 99], "note": "x"}
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, beyond])
    data = of_files(path, on_bad_sample="skip", unused_fields="error")
    assert first_look(data, None, 10).notes == []
    folder = prepare(data, None, 10, tmp_path / "cache")
    assert read_report(folder)["unused"] == [] and read_report(folder)["bad"] == 1
    with pytest.raises(DataError, match=r"a\.jsonl: not used: note; take them out"):
        first_look(data, None, 100)


def test_a_source_is_looked_at_as_far_as_a_run_takes_it(tmp_path: Path) -> None:
    """What is wrong behind the last sample that a source gives is refused by neither."""
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}, {"input_ids": [5] * 33}, "{"])
    for limit in ({"max_samples": 1}, {"max_tokens": 3}):
        data = DataBlock(train=[{"path": str(path), **limit}], sequence_length=32)
        assert first_look(data, None, 100).shapes == [f"{path}: tokenized: input_ids"]
        assert len(Corpus.open(prepare(data, None, 100, tmp_path / "cache"))) == 1
    for more in ({"max_samples": 2}, {"max_tokens": 35}, {"max_tokens": 1}):
        data = DataBlock(train=[{"path": str(path), **more}], sequence_length=32)
        with pytest.raises(DataError):
            first_look(data, None, 100)
        with pytest.raises(DataError):
            prepare(data, None, 100, tmp_path / "cache")
