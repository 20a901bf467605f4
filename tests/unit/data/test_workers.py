"""Processes make what threads make, and none outlives the process that it works for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import CHAT, TOKENIZER, block, write_lines
from tests.support.launch import ROOT
from uspft.config.problems import RunFailed
from uspft.data import empty, prepare

LONG = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "漢字 🙂 " * 9}]
BAD = ["{", {"messages": [{"role": "robot", "content": "x"}]}, {"text": "another shape"}]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that start, now that any data is worth them."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*words, **options))
        return found[-1]

    monkeypatch.setattr("uspft.data.workers.subprocess.Popen", start)
    monkeypatch.setattr("uspft.data.reading.WORTH_PROCESSES", 0)
    monkeypatch.setattr("uspft.data.reading.EACH_PROCESS", 1)
    monkeypatch.setattr("uspft.data.reading.BATCH_RECORDS", 3)
    return found


@pytest.mark.timeout(120)
def test_processes_make_what_threads_make(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    lines = [CHAT, {"messages": LONG}, *BAD] * 6
    path = write_lines(tmp_path / "a.jsonl", lines)
    text = tmp_path / "t.txt"
    text.write_text("one text\n")
    folders = []
    for workers in (1, 2):
        data = block(path, text, workers=workers, on_bad_sample="skip")
        folders.append(prepare(data, str(TOKENIZER), 8192, tmp_path / f"cache{workers}"))
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert folders[0].name == folders[1].name
    for name in ("tokens.int32", "labels.int32", "offsets.int64", "origins.int64", "corpus.json"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second, name
    reports = [(folder / "report.json").read_text() for folder in folders]
    kept = [[line for line in r.splitlines() if '"seconds"' not in line] for r in reports]
    assert kept[0] == kept[1] and '"bad": 18' in reports[0]


@pytest.mark.timeout(120)
def test_a_killed_process_is_told(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT] * 60)

    def tick(done: int, total: int) -> None:
        for process in started:
            process.kill()

    with pytest.raises(RunFailed, match=r"was killed \(SIGKILL\); where memory ran out, write a"):
        prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache", tick)
    assert list((tmp_path / "cache").iterdir()) == []


ENDED = """
import os, signal, sys
from pathlib import Path
from tests.support.data_cases import TOKENIZER, block
from uspft.data import prepare, reading
reading.WORTH_PROCESSES, reading.EACH_PROCESS, reading.BATCH_RECORDS = 0, 1, 3
def tick(done, total):
    here = f"/proc/{os.getpid()}/task"
    found = [Path(here, task, "children").read_text() for task in os.listdir(here)]
    print(*" ".join(found).split(), flush=True)
    os.kill(os.getpid(), int(sys.argv[3]))
try:
    prepare(block(Path(sys.argv[1])), str(TOKENIZER), 8192, Path(sys.argv[2]), tick)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_preparation_that_is_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT] * 60)
    cache = tmp_path / "cache"
    words = [sys.executable, "-c", ENDED, str(path), str(cache), str(int(number))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (130 if number == signal.SIGINT else -number), done.stderr
    assert "Traceback" not in done.stderr
    workers = [int(word) for word in done.stdout.splitlines()[0].split()]
    assert workers
    until = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.05)
    left = [entry.name for entry in cache.iterdir()]
    assert len(left) == (number == signal.SIGKILL), left
    assert empty(cache) == (0, 0)
    assert list(cache.iterdir()) == []
