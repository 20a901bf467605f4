"""What `inspect` tells of a row is what its ranks will hold and train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.data_cases import TOKENIZER, write_lines
from tests.support.launch import ROOT
from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.prepare import prepare
from uspft.data.corpus.tokenise import load_tokeniser
from uspft.data.rows.stream import training_rows
from uspft.prepare.examine import Examined, examine
from uspft.prepare.inspection import Bin, bins, inspected, texts_of

LENGTHS = [30, 9, 17, 64, 3, 40, 11]


def prepared(folder: Path, **parallel: Any) -> Examined:
    records = [
        {
            "input_ids": list(range(10 * n, 10 * n + length)),
            "labels": [-100] * 2 + list(range(10 * n + 2, 10 * n + length)),
        }
        for n, length in enumerate(LENGTHS)
    ]
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json"), "dtype": "float32"},
        "data": {
            "train": str(write_lines(folder / "a.jsonl", records)),
            "sequence_length": 64,
            "shuffle": False,
        },
        "parallel_config": parallel,
        "training": {"steps": 2, "global_batch_size": 4},
        "launch": {"device": "cpu"},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    found = examine(path, [], 1, 8)
    return found.knowing(corpus=prepare(found.recipe.data, None, 8192, folder / "cache"))


LAYOUTS = {
    "ring": {"context_parallel": 4, "context_parallel_algo": "ring_cp", "data_parallel": 2},
    "hybrid": {
        "context_parallel": 4,
        "context_parallel_algo": "hybrid_cp",
        "ulysses_degree_in_cp": 2,
        "data_parallel": 2,
    },
    "tensor": {
        "model_parallel": 2,
        "context_parallel": 2,
        "context_parallel_algo": "planned_cp",
        "data_parallel": 2,
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_those_of_the_run(tmp_path: Path, name: str) -> None:
    found = prepared(tmp_path, **LAYOUTS[name])
    stream = training_rows(found.recipe.data, found.corpus, found.recipe.seed)
    seen = inspected(found, stream.rows_in_epoch(0), str)
    assert seen.filling and seen.filling.tokens == sum(LENGTHS)
    assert seen.filling.share == sum(LENGTHS) / (64 * len(seen.rows))
    origins = []
    for row in seen.rows:
        real = stream.row(row.index)
        held = sorted(place for one in row.holders for a, b in one.spans for place in range(a, b))
        assert held == list(range(64))
        trains = int((real.labels != -100).sum())
        assert trains == int(row.trained.sum()) == sum(one.targets for one in row.holders)
        assert trains == sum(document.targets for document in row.documents)
        for document in row.documents:
            origins.append(document.origin)
            start, stop = document.span
            ids = [one for run in document.runs for one in run.ids]
            assert ids == real.input_ids[start:stop].tolist()
            assert [run.trained for run in document.runs] == [False, True]
            assert [len(run.ids) for run in document.runs] == [2, stop - start - 2]
        replica = row.index % 4 % 2
        ranks = [rank for one in row.holders for rank in one.ranks]
        assert sorted(ranks) == list(range(4 * replica, 4 * replica + 4))
    assert sorted(origins) == [f"{tmp_path}/a.jsonl:{n + 1}" for n in range(len(LENGTHS))]


def test_samples_under_strategies_are_shown_in_the_layout_of_their_length(tmp_path: Path) -> None:
    short = {"max_length": 16, "context_parallel": 1, "data_parallel": 8}
    long = {
        "max_length": 64,
        "context_parallel": 8,
        "context_parallel_algo": "ring_cp",
        "data_parallel": 1,
    }
    found = prepared(tmp_path, strategies=[short, long])
    seen = inspected(found, len(LENGTHS), str)
    assert seen.filling is None
    for row, length in zip(seen.rows, LENGTHS, strict=True):
        assert row.segments.bounds == (0, length)
        assert row.segments.length == (16 if length <= 16 else 64)
        assert len(row.holders) == (1 if length <= 16 else 8)


def test_bins_hold_every_sample_once() -> None:
    lengths = np.array([1, 2, 3, 4, 1023, 1024, 1 << 40])
    found = bins(lengths)
    assert found[:3] == [Bin(1, 1, 1, 1), Bin(2, 3, 2, 5), Bin(4, 7, 1, 4)]
    assert sum(one.samples for one in found) == 7
    assert sum(one.tokens for one in found) == int(lengths.sum())
    assert [one.samples for one in found if one.most == 1023] == [1]


def test_tokens_that_share_a_character_are_shown_together() -> None:
    data: Any = type("Data", (), {"chat_template": None, "train_on": "all"})
    backend = load_tokeniser(str(TOKENIZER), data).backend
    text = "a 🙂 漢 b\ufffd"

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=False))

    ids = backend.encode(text).ids
    found = texts_of(ids, decode)
    assert "".join(word for word, _ in found) == text
    assert sum(count for _, count in found) == len(ids) > len(found)


def test_the_corpus_says_where_a_sample_is_from(tmp_path: Path) -> None:
    found = prepared(tmp_path)
    (first,) = inspected(found, 1, str).rows
    assert first.documents[0].origin == Corpus.open(found.corpus).origin(0)
    assert [one.ranks for one in first.holders] == [[0]]
