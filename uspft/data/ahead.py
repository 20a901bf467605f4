"""What the next step needs, made in a thread while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Needed = TypeVar("Needed")


class Ahead(Generic[Needed]):
    """A thread that makes what one step needs, so that at most one step is made ahead."""

    def __init__(self, make: Callable[[int], Needed]) -> None:
        """make: makes what a step needs, by its number; runs in the thread or in the caller's, and
        never in both at a time."""
        self._make = make
        self._pool = ThreadPoolExecutor(1, "rows ahead")
        self._begun: tuple[int, Future[Needed]] | None = None

    def begin(self, step: int) -> None:
        """Begin to make what a step needs; the one before it has been taken."""
        self._drop()
        self._begun = step, self._pool.submit(self._make, step)

    def taken(self, step: int) -> Needed:
        """Return what a step needs, made here unless that was begun. Raises what making it did."""
        if not self._begun or self._begun[0] != step:
            self._drop()
            return self._make(step)
        (_, making), self._begun = self._begun, None
        return making.result()

    def close(self) -> None:
        """Give up what was begun, and end the thread."""
        self._drop()
        self._pool.shutdown()

    def _drop(self) -> None:
        """Give up what nobody has asked for, and the fault that it may have met."""
        if self._begun and not self._begun[1].cancel():
            wait([self._begun[1]])
        self._begun = None
