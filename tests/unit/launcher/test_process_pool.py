"""A pool's processes have an environment of their own, and tell how the first of them ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

import pytest

from uspft.launcher.process_pool import ProcessPool


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    ProcessPool(
        1, []
    ).close()  # ends the server that started ranks of earlier tests, if there is one
    pool = ProcessPool(2, ["fractions"])
    pool.begin(int)
    yield pool
    pool.close()


def environment() -> tuple[dict[str, str], bool]:
    return dict(os.environ), "fractions" in sys.modules


def test_processes_begin_with_imports_made_and_one_thread_each(pool: ProcessPool) -> None:
    before = dict(os.environ)
    there, imported = pool.submit(environment).result()
    assert imported and there["TOKENIZERS_PARALLELISM"] == "false"
    assert there["PYTHONPATH"].split(os.pathsep) == sys.path
    assert dict(os.environ) == before and "TOKENIZERS_PARALLELISM" not in before


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(3)", "ended with exit code 3"), ("os.abort()", "was killed (SIGABRT)")],
)
def test_the_end_of_a_process_is_told(pool: ProcessPool, end: str, how: str) -> None:
    first, second = (
        pool.submit(exec, f"import os, time; {what}") for what in (end, "time.sleep(600)")
    )
    with pytest.raises(BrokenProcessPool):
        first.result()
    assert pool.end_of_first() == how
    with pytest.raises(BrokenProcessPool):
        second.result()


def test_processes_hear_no_interrupt(pool: ProcessPool) -> None:
    working = pool.submit(exec, "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert working.result() is None
    assert signal.SIGINT in pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
