"""Processes make what threads make, and none outlives the process that it works for."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from inspect import getsource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data_cases import CHAT, TOKENIZER, block, write_lengths, write_lines
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT
from uspft.config.problems import RunFailed
from uspft.data.corpus.corpus import empty
from uspft.data.corpus.prepare import prepare
from uspft.data.corpus.workers import SHRINKS, SourcePart
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import Columns, parquet_bytes
from uspft.data.records.values import Naming
from uspft.launcher.process_pool import ProcessPool

LONG = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "漢字 🙂 " * 9}]
TEXTS = [{"text": "a b c"}] * 60
BAD = ["{", {"messages": [{"role": "robot", "content": "x"}]}, {"text": "another shape"}]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that fork others, now that any data is worth them."""
    found: list[int] = []

    def start(count: int, modules: Sequence[str]) -> ProcessPool:
        pool, until = ProcessPool(count, modules), time.monotonic() + HANG_SECONDS
        while not (here := servers(os.getpid())) and time.monotonic() < until:
            time.sleep(0.01)  # it has been forked, and is not yet called so
        found.extend(here)
        return pool

    monkeypatch.setattr("uspft.data.corpus.workers.ProcessPool", start)
    monkeypatch.setattr("uspft.data.corpus.workers.WORTH_PROCESSES", 0)
    monkeypatch.setattr("uspft.data.corpus.workers.EACH_PROCESS", 1)
    monkeypatch.setattr("uspft.data.corpus.workers.BATCH_RECORDS", 3)
    monkeypatch.setattr("uspft.data.files.tables.RECORDS", 3)
    return found


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes import what texts alone need, since transformers takes them seconds."""
    monkeypatch.setattr("uspft.data.corpus.workers.IMPORTED", ("uspft.data.corpus.workers",))


def children(process: int) -> list[int]:
    """The processes that a process has started, in any thread."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # a thread that ends meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def servers(process: int) -> list[int]:
    """Those of them that fork others."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(process)}
    return [child for child, command in commands.items() if b"forkserver" in command]


def test_processes_make_what_threads_make(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[Columns] = []
    entries = Columns.entries
    monkeypatch.setattr(Columns, "entries", lambda own: here.append(own) or entries(own))
    lines = [CHAT, {"messages": LONG}, *BAD] * 6
    path = write_lines(tmp_path / "a.jsonl", lines)
    text = tmp_path / "t.txt"
    text.write_text("one text\n")
    table = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([CHAT, {"messages": LONG}] * 6), table)
    folders = []
    for workers in (1, 2):
        here.clear()
        data = block(path, text, table, workers=workers, on_bad_sample="skip")
        folders.append(prepare(data, str(TOKENIZER), 8192, tmp_path / f"cache{workers}"))
    # Only what tells the shape is unpacked here, for the cache's name and again as it is read.
    assert [columns.first for columns in here] == [1, 1]
    assert len(started) == 1 and servers(os.getpid()) == [], "one forks the others, and ends"
    assert folders[0].name == folders[1].name
    for name in ("tokens.int32", "labels.int32", "offsets.int64", "origins.int64", "corpus.json"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second, name
    reports = [(folder / "report.json").read_text() for folder in folders]
    kept = [[line for line in r.splitlines() if '"seconds"' not in line] for r in reports]
    assert kept[0] == kept[1] and '"bad": 18' in reports[0]


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize(("everyone", "how"), [(False, r"was killed \(SIGKILL\)"), (True, "ended")])
def test_a_killed_process_is_told(
    tmp_path: Path, started: list[int], everyone: bool, how: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)

    def tick(done: int, total: int) -> None:
        forks = started[-1]
        for process in [forks] * everyone + children(forks):
            os.kill(process, signal.SIGKILL)

    with pytest.raises(RunFailed, match=f"{how}; where memory ran out, write a smaller"):
        prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache", tick)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("imports")
def test_data_that_is_there_needs_no_processes(tmp_path: Path, started: list[int]) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS[:9])
    folders = {prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache") for _ in range(2)}
    assert len(folders) == 1 and len(started) == 2
    assert servers(os.getpid()) == []


def lives(process: int) -> bool:
    """Whether a process has not ended; whoever is to ask for its exit code may take seconds."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ENDED = f"""
import os, signal, sys
from contextlib import suppress
from pathlib import Path
from uspft.config.inputs import DataBlock
from uspft.data.corpus.prepare import prepare
from uspft.data.corpus import workers
workers.WORTH_PROCESSES, workers.EACH_PROCESS, workers.BATCH_RECORDS = 0, 1, 3
workers.IMPORTED = (workers.__name__,)
{getsource(children)}
def tick(done, total):
    forks = children(os.getpid())  # and what multiprocessing keeps account of semaphores with
    print(*forks, *(child for one in forks for child in children(one)), flush=True)
    os.kill(os.getpid(), int(sys.argv[3]))
try:
    data = DataBlock.model_validate({{"train": sys.argv[1], "sequence_length": 8}})
    prepare(data, None, 8192, Path(sys.argv[2]), tick)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_nothing_is_left_of_a_preparation_that_is_ended(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "a.jsonl", [3] * 7 + [2] * 53)
    both = {}
    for number in (signal.SIGINT, signal.SIGKILL):  # side by side, since starting takes longest
        words = [sys.executable, "-c", ENDED, str(path), str(tmp_path / number.name)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        both[number] = subprocess.Popen([*words, str(int(number))], cwd=ROOT, text=True, **pipes)
    for number, process in both.items():
        out, err = process.communicate()
        assert process.returncode == (130 if number == signal.SIGINT else -number), err
        assert "Traceback" not in err
        workers = [int(word) for word in out.splitlines()[0].split()]
        assert len(workers) > 1
        until = time.monotonic() + HANG_SECONDS
        while any(map(lives, workers)):
            assert time.monotonic() < until, "a process is left"
            time.sleep(0.05)
        cache = tmp_path / number.name
        left = [entry.name for entry in cache.iterdir()]
        assert len(left) == (number == signal.SIGKILL), left
        gone = empty(cache)
        assert gone.corpora == gone.unfinished == len(left)
        assert list(cache.iterdir()) == []


def part(path: Path, kind: str) -> SourcePart:
    return SourcePart(0, Naming(), SourceFile(path, path.name, kind))


def test_a_file_counts_as_what_it_unpacks_to(tmp_path: Path) -> None:
    texts = [f"{number} " + "word " * 100 for number in range(1000)]
    table, plain, packed = (tmp_path / name for name in ("a.parquet", "a.jsonl", "a.jsonl.gz"))
    pq.write_table(pa.Table.from_pylist([{"text": text} for text in texts]), table)
    plain.write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    with gzip.open(packed, "wt") as file:
        file.write(plain.read_text())
    held = sum(map(len, texts))
    assert 4 * table.stat().st_size < held < part(table, "parquet").bytes < 1.1 * held
    assert part(plain, "json").bytes == plain.stat().st_size
    assert part(packed, "json").bytes == SHRINKS * packed.stat().st_size


def test_a_table_that_cannot_be_read_counts_as_its_file(tmp_path: Path) -> None:
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"no table at all")
    assert parquet_bytes(broken) == broken.stat().st_size
