"""The token orders of rows, found in a process that launches no kernels.

A search takes up to a second of a core. In a thread of the rank it would take Python from the one
that launches kernels, so it runs beside the rank, and the rank waits for a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from uspft.segments import Segments

if TYPE_CHECKING:
    from uspft.sequence import Algorithm
    from uspft.sequence.rows.share import Order

REMEMBERED = 4096
"""How many orders are remembered: those of the rows of a step and of the next."""


class Orders:
    """The token orders of rows by algorithm, each found once; threads may share it."""

    def __init__(self, beside: Connection | None = None) -> None:
        """beside: the pipe to a process that searches; None: this one does."""
        self._beside, self._talking = beside, threading.Lock()
        self._found: OrderedDict[tuple[Algorithm, Segments], Order] = OrderedDict()

    def of(self, algorithm: Algorithm, segments: Segments) -> Order:
        """Return the positions of a row that each context rank holds."""
        with self._talking:
            key = algorithm, segments
            if key not in self._found:
                self._found[key] = self._search(algorithm, segments)
                if len(self._found) > REMEMBERED:
                    self._found.popitem(last=False)
            return self._found[key]

    def _search(self, algorithm: Algorithm, segments: Segments) -> Order:
        if self._beside:
            try:
                self._beside.send((algorithm, segments))
                found: Order | Exception = self._beside.recv()
            except (EOFError, OSError):
                self._beside = None  # it was killed: what it finds can be found here too
            else:
                if isinstance(found, Exception):
                    raise found
                return found
        return algorithm.token_order(segments)


@contextmanager
def searching_beside() -> Iterator[Orders]:
    """Give token orders that a process of their own finds, as long as the block runs.

    It is forked, which spares it the imports, so this has to come before devices and process
    groups. A thread that draws on the screen holds nothing that it needs.
    """
    here, there = Pipe()
    process = os.fork()
    if process == 0:
        try:
            here.close()  # else the pipe would not end with the rank
            _answer(there)
        finally:
            os._exit(0)  # what was opened and registered before is the rank's to close
    there.close()
    try:
        yield Orders(here)
    finally:
        here.close()
        os.waitpid(process, 0)


def _answer(asked: Connection) -> None:
    """Answer questions until the rank is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            algorithm, segments = asked.recv()
        except EOFError:
            return
        try:
            found = algorithm.token_order(segments)
        except Exception as error:  # the rank raises it
            found = error
        try:
            asked.send(found)
        except OSError:
            return
