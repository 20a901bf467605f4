"""The display of a run for a person: a live line on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console as Terminal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

QUIET_SECONDS = 15.0
"""The least time between two lines of progress where output is not a terminal."""


class RunDisplay:
    """The progress display of a run of `steps` steps, silent on all ranks but the first."""

    def __init__(self, steps: int, done: int, *, speaks: bool) -> None:
        self._terminal = Terminal(quiet=not speaks, highlight=False, soft_wrap=True)
        self._steps, self._done = steps, done
        self._last_line, self._started = 0.0, time.monotonic()
        self._first_step = done
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._terminal,
            disable=not (speaks and self._terminal.is_terminal),
        )
        self._task = self._progress.add_task("", total=steps, completed=done, facts="")

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Show an evaluation's record in one line."""
        loss, perplexity = (_shown(record[f"eval_{name}"]) for name in ("loss", "perplexity"))
        sets = record.get("eval_sets", {})
        parts = [f"{title} {_shown(one['loss'])}" for title, one in sets.items()]
        each = f"  ({', '.join(parts)})" if parts else ""
        line = f"evaluation after step {record['step']}: loss {loss}  perplexity {perplexity}"
        self.say(f"{line}  {record['eval_target_tokens']:,} tokens{each}")

    def step(self, record: dict[str, Any]) -> None:
        """Show a training step's record."""
        self._done = record["step"]
        facts = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        self._progress.update(self._task, completed=self._done, facts=facts)
        now = time.monotonic()
        due = now - self._last_line >= QUIET_SECONDS or self._done == self._steps
        if not self._terminal.is_terminal and due:
            self._last_line = now
            rate = (now - self._started) / max(1, self._done - self._first_step)
            left = time.strftime("%H:%M:%S", time.gmtime(rate * (self._steps - self._done)))
            self.say(f"step {self._done}/{self._steps}  {facts}  {left} left")


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
