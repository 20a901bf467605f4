"""The token orders of rows, found in a process that launches no kernels.

A search takes up to a second of a core. In a thread of the rank it would take Python from the one
that launches kernels, so it runs in a process beside the rank, which waits for the answer.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING

from uspft.launcher.process_pool import end_with_parent
from uspft.segments import Segments

if TYPE_CHECKING:
    from uspft.sequence import Algorithm
    from uspft.sequence.rows.share import Order

REMEMBERED = 4096
"""How many orders are remembered: those of the rows of a step and of the next."""


class Orders:
    """The token orders of rows by algorithm, each found once; threads may share it."""

    def __init__(self, beside: ProcessPoolExecutor | None = None) -> None:
        """beside: the process that searches; None: this one does."""
        self._beside, self._searching = beside, threading.Lock()
        self._found: OrderedDict[tuple[Algorithm, Segments], Order] = OrderedDict()

    def of(self, algorithm: Algorithm, segments: Segments) -> Order:
        """Return the positions of a row that each context rank holds."""
        with self._searching:
            key = algorithm, segments
            if key not in self._found:
                self._found[key] = self._search(algorithm, segments)
                if len(self._found) > REMEMBERED:
                    self._found.popitem(last=False)
            return self._found[key]

    def _search(self, algorithm: Algorithm, segments: Segments) -> Order:
        if self._beside:
            try:
                return self._beside.submit(algorithm.token_order, segments).result()
            except BrokenProcessPool:
                self._beside = None  # it was killed: what it finds can be found here too
        return algorithm.token_order(segments)


@contextmanager
def searching_beside() -> Iterator[Orders]:
    """Give token orders that a process of their own finds, as long as the block runs.

    It is forked, which spares it the imports, and at once, since that has to come before devices
    and process groups. A thread that draws on the screen holds nothing that it needs.
    """
    with ProcessPoolExecutor(1, get_context("fork"), _begin) as beside:
        beside.submit(os.getpid).result()
        yield Orders(beside)


def _begin() -> None:
    """Begin the process that searches: signals are the rank's to heed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
