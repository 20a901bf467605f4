"""Token orders found in a process beside: the same ones, each asked for once, and none lost."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.algorithms import named
from tests.support.rows import packed
from uspft.data.rows.orders import Orders, searching_beside
from uspft.segments import Segments

ROWS = [packed([40, 7, 17, 64]), packed([128]), Segments((0, 9, 50), 128)]


@dataclass(frozen=True)
class Teller:
    """An algorithm whose order tells the process that found it."""

    broken: int = 0

    def token_order(self, segments: Segments) -> Any:
        if segments.length == self.broken:
            raise ValueError("this row cannot be dealt out")
        return os.getpid()


def test_orders_are_those_of_the_algorithm() -> None:
    planned = named("planned_cp", 2, 4)
    with searching_beside() as beside:
        for orders in (beside, Orders()):
            for row in ROWS:
                assert orders.of(planned, row) == planned.token_order(row)


def test_they_are_found_beside_and_remembered() -> None:
    teller: Any = Teller()
    with searching_beside() as beside:
        process = beside.of(teller, ROWS[0])
        assert process != os.getpid() == Orders().of(teller, ROWS[0])
        assert beside.of(teller, ROWS[1]) == process
        os.kill(process, signal.SIGKILL)
        assert beside.of(teller, ROWS[0]) == process, "it is asked twice"
        assert beside.of(teller, ROWS[2]) == os.getpid(), "what was killed is not replaced"
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_error_is_raised_here() -> None:
    teller: Any = Teller(broken=128)
    with searching_beside() as beside:
        with pytest.raises(ValueError, match="cannot be dealt out"):
            beside.of(teller, ROWS[0])
        assert beside.of(teller, packed([64])) != os.getpid()


def test_the_process_ends_with_the_one_that_it_searches_for() -> None:
    """Though that one was killed and could say nothing."""
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        teller: Any = Teller()
        with searching_beside() as beside:
            os.write(writer, b"%d" % beside.of(teller, ROWS[0]))
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(owner, 0)
    with os.fdopen(reader, "rb") as told:
        assert int(told.read()) > 0  # and its end of the pipe is closed: it has ended
