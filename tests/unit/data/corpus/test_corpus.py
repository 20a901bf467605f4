"""The cache of tokenised data: its key, writers at once, and that workers change nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import (
    CHAT,
    TEMPLATES,
    TOKENIZER,
    block,
    changed_tokenizer,
    faults_of,
    source,
    write_lengths,
    write_lines,
)
from tests.support.hangs import HANG_SECONDS
from uspft.data.corpus.corpus import Corpus, corpora_in, empty, holding
from uspft.data.corpus.prepare import prepare
from uspft.data.faults import DataError
from uspft.lease import Lease

SIZE = 50_000
"""A vocabulary that has all ids of `write_lengths`."""


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uspft.data.corpus.workers.BATCH_RECORDS", 3)
    path = write_lines(tmp_path / "a.jsonl", ({"text": f"{i} " * (i % 40 + 1)} for i in range(200)))
    corpora, threads = [], []
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        threads[-1] += thread.name.startswith("tokenise")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for workers in (0, 1, 4):
        threads.append(0)
        folder = tmp_path / f"cache{workers}"
        corpora.append(prepare(block(path, workers=workers), str(TOKENIZER), 8192, folder))
    assert threads == [1, 1, 4]
    assert len({folder.name for folder in corpora}) == 1
    for name in ("tokens.int32", "labels.int32", "offsets.int64", "origins.int64", "corpus.json"):
        first, *others = ((folder / name).read_bytes() for folder in corpora)
        assert all(other == first for other in others)


def test_faults_come_in_file_order_whatever_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uspft.data.corpus.workers.BATCH_RECORDS", 2)
    ids = [{"input_ids": [5]}, {"input_ids": [99]}, {"input_ids": "x"}] * 5
    path = write_lines(tmp_path / "a.jsonl", ids)
    found = [faults_of(tmp_path, block(path, workers=w), None, 10) for w in (1, 3)]
    assert found[0] == found[1]
    beyond, text = found[0]
    assert beyond.startswith(
        f"{path}:2: input_ids holds 99, the vocabulary is 0 … 9 (5 such: lines"
    )
    assert "(5 such: lines 2, 5, 8, …); " in beyond
    assert text.startswith(f"{path}:3: input_ids is a string (5 such: lines 3, 6, 9, …); write a")


def test_the_second_time_nothing_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    path = write_lines(tmp_path / "a.jsonl", [CHAT] * 3)

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    folder = prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache", note)
    size = path.stat().st_size
    assert seen[-1] == (size, size) and len(seen) >= 1
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr("uspft.data.corpus.prepare.build", None)
    assert prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache") == folder


def test_the_key_is_all_that_changes_the_tokens_and_no_more(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])

    def key(**changes: Any) -> str:
        tokenizer = changes.pop("tokenizer", TOKENIZER)
        size = changes.pop("size", 8192)
        train = changes.pop("train", source(path))
        return prepare(block(train, **changes), str(tokenizer), size, tmp_path / "cache").name

    first = key()
    same = [key(shuffle=False), key(packing="none"), key(workers=1), key(sequence_length=999)]
    same.append(key(train=source(path, format="messages")))  # which auto finds
    assert set(same) == {first}
    bos = changed_tokenizer(tmp_path / "t", (TEMPLATES / "chatml.jinja").read_text(), eos_token="x")
    other = tmp_path / "other.jinja"
    other.write_text((TEMPLATES / "chatml.jinja").read_text().replace("assistant\\n", "assistant "))
    others = [
        key(train_on="all"),
        key(chat_template=str(other)),
        key(overlong="truncate"),
        key(overlong="truncate", sequence_length=999),
        key(tokenizer=bos),
        key(size=9000),
        key(train=source(path, weight=2)),
    ]
    stat = path.stat()
    other = {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "Howdy"}]}
    write_lines(path, [other])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    others.append(key())
    assert len({first, *others}) == 1 + len(others)


def test_the_tokens_have_a_name_wherever_their_files_lie(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [CHAT])
    other = tmp_path / "moved/b.jsonl"
    other.parent.mkdir()
    other.write_bytes(one.read_bytes())

    def prepared(path: Path, **changes: Any) -> tuple[str, str]:
        folder = prepare(block(path, **changes), str(TOKENIZER), 8192, tmp_path / "cache")
        corpus = Corpus.open(folder)
        assert corpus.origin(0) == f"{path}:1"  # what is said of a sample names today's file
        return folder.name, corpus.contents

    first, moved, otherwise = prepared(one), prepared(other), prepared(one, train_on="all")
    assert first[0] != moved[0] and first[1] == moved[1] != otherwise[1]
    text = write_lines(tmp_path / "t.jsonl", [{"text": "one"}, {"text": "two"}])
    whole = tmp_path / "t.txt"
    whole.write_bytes(text.read_bytes())  # read as one text
    assert prepared(text)[1] != prepared(whole)[1]


def stopped_inside(number: int, path: Path, cache_dir: Path) -> None:
    """Be a command that prepares data and gets a signal inside."""

    def stop(done: int, total: int) -> None:
        os.kill(os.getpid(), number)

    prepare(block(path), None, SIZE, cache_dir, stop)


def test_what_a_killed_preparation_left_is_cleared_and_a_live_one_s_is_not(tmp_path: Path) -> None:
    path, cache_dir = write_lengths(tmp_path / "a.jsonl", [3] * 30), tmp_path / "cache"

    def start(number: int) -> ForkProcess:
        process = get_context("fork").Process(target=stopped_inside, args=(number, path, cache_dir))
        process.start()
        return process

    waiting = start(signal.SIGSTOP)
    state, until = Path(f"/proc/{waiting.pid}/stat"), time.monotonic() + HANG_SECONDS
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until and waiting.exitcode is None
        time.sleep(0.01)
    # begun last: one that began later would clear what the killed one left
    killed = start(signal.SIGKILL)
    killed.join(HANG_SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    (cache_dir / ".mine").mkdir()
    left = {entry.name for entry in cache_dir.iterdir()} - {".mine"}
    assert len(left) == 2 and all(name.endswith(".partial") for name in left)
    folder = prepare(block(path), None, SIZE, cache_dir)
    found = {entry.name for entry in cache_dir.iterdir()}
    assert len(found) == 3 and found > {".mine", folder.name} and len(found & left) == 1
    waiting.kill()
    waiting.join(HANG_SECONDS)
    write_lengths(path, [2])
    other = prepare(block(path), None, SIZE, cache_dir)
    assert {entry.name for entry in cache_dir.iterdir()} == {".mine", folder.name, other.name}


def test_two_may_prepare_the_same_at_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ({"text": f"{i} " * 50} for i in range(300)))
    folders: list[Path] = []
    work = threading.Barrier(3)

    def run() -> None:
        work.wait()
        folders.append(prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache"))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folders[0].name]


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "a.jsonl", [3])
    (tmp_path / "cache").write_text("a file")
    (line,) = faults_of(tmp_path, block(path), None, 10_000)
    assert line.startswith("data.cache_dir: cannot write ")


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    folder = prepare(
        block(write_lengths(tmp_path / "a.jsonl", [3])), None, 9999, tmp_path / "cache"
    )
    (folder / "tokens.int32").write_bytes(b"1234")
    with pytest.raises(DataError, match="damaged"):
        Corpus.open(folder)
    with pytest.raises(DataError, match="delete the folder"):
        Corpus.open(tmp_path / "nowhere")


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
