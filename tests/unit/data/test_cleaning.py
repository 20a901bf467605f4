"""A cache is emptied of corpora and of what was left, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.data_cases import block, write_lengths
from uspft.data import corpora_in, empty, holding, prepare
from uspft.lease import Lease


def test_what_is_no_corpus_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert empty(cache) == (0, 0, 0) and not cache.exists()
    folders = [
        prepare(block(write_lengths(tmp_path / f"{n}.jsonl", [n])), None, 9999, cache)
        for n in (3, 5)
    ]
    theirs = [cache / "notes.txt", cache / ("a" * 24), cache / ".mine.partial"]
    theirs[0].write_text("mine")
    for folder in theirs[1:]:
        folder.mkdir()
    live = cache / f".{'b' * 24}.{'c' * 32}.partial"
    Lease.take(live, print)
    killed = cache / f".{'d' * 24}.{'e' * 32}.partial"
    (killed / ("d" * 24)).mkdir(parents=True)
    (killed / ("d" * 24) / "tokens.int32").write_bytes(bytes(100))
    os.utime(killed, (0, 0))
    assert corpora_in(cache) == sorted(folders)
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    assert holding(folders) == (2, size, 0) and size > 8 * 4 * 2
    assert empty(cache) == (3, size + 100, 1)
    assert sorted(cache.iterdir()) == sorted([*theirs, live])
