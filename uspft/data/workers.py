"""Samples made of bundles, on threads or, where there is much data, in processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from uspft.config.problems import RunFailed
from uspft.data.faults import BadRecord
from uspft.data.reading import Bundle, Encoder, SourcePart, bundles
from uspft.data.samples import Sample
from uspft.launcher.process_pool import ProcessPool

WORTH_PROCESSES = 1 << 24
"""Bytes of data from which on processes work in place of threads, since their imports take time."""
EACH_PROCESS = 1 << 22
"""Bytes of data that are worth one more process."""
_IMPORTED = ("transformers.utils.chat_template_utils", "uspft.__main__", __name__)
Samples = list[Sample | BadRecord]
_given: list[Encoder] = []
"""In a process that works: the encoder that it was begun with."""


@contextmanager
def processes_for(parts: list[SourcePart], workers: int) -> Iterator[ProcessPool | None]:
    """Yield the processes that tokenising these parts is worth, `workers` at most; None where that
    is none. Their imports begin at once, and they end with the `with` block."""
    size = sum(part.bytes for part in parts)
    if workers == 1 or size < WORTH_PROCESSES:
        yield None
        return
    pool = ProcessPool(min(workers, 1 + size // EACH_PROCESS), _IMPORTED)
    try:
        yield pool
    finally:
        pool.close()


def tokenised(
    parts: list[SourcePart], encoder: Encoder, workers: int | ProcessPool, full: Set[int]
) -> Iterator[tuple[Samples, int]]:
    """Yield the samples of all parts in order, whatever the workers, some at a time, with the bytes
    or hub records that these were.

    workers: processes, or a number of threads; the caller's thread reads files and no more. full:
    the sources of which no more is wanted; what was read ahead of them comes all the same. Only a
    few bundles are in memory at a time. Raises RunFailed where a process is killed.
    """
    every = bundles(parts, full)
    if isinstance(workers, int):
        with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as threads:
            try:
                yield from _in_order(
                    every, lambda one: threads.submit(one.samples, encoder), 2 * workers
                )
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        return
    workers.begin(_begin, encoder)
    try:
        yield from _in_order(every, lambda one: workers.submit(_samples, one), 2 * workers.count)
    except BrokenProcessPool as error:
        what = f"a process that tokenises {workers.end_of_first()}"
        raise RunFailed(f"{what}; where memory ran out, write a smaller data.workers") from error


def _in_order(
    every: Iterator[Bundle], submit: Callable[[Bundle], Future[Samples]], most: int
) -> Iterator[tuple[Samples, int]]:
    """Yield the samples of bundles in their order, of which `most` are worked on or wait."""
    pending: deque[tuple[Future[Samples], int]] = deque()
    for bundle in every:
        pending.append((submit(bundle), bundle.size))
        if len(pending) > most:
            making, size = pending.popleft()
            yield making.result(), size
    for making, size in pending:
        yield making.result(), size


def _begin(encoder: Encoder) -> None:
    _given.append(encoder)


def _samples(bundle: Bundle) -> Samples:
    return bundle.samples(_given[0])
