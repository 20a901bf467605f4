"""The progress display of a run: a live view on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from uspft.launcher.terminal import Waiting
from uspft.metrics.journal import Best

QUIET_SECONDS = 15.0
"""The least time between two lines of progress where output is not a terminal."""


class RunDisplay:
    """The progress display of a run of `steps` steps; is_main: on rank 0, the others show nothing.

    terminal: where it is shown; by default the standard output.
    """

    def __init__(
        self, steps: int, done: int, *, is_main: bool, terminal: Terminal | None = None
    ) -> None:
        self._terminal = terminal or Terminal(quiet=not is_main, highlight=False, soft_wrap=True)
        self._steps, self._done = steps, done
        self._last_line, self._started = 0.0, time.monotonic()
        self._first_step = done
        self._facts = self._evaluated = ""
        self._waiting = Waiting(self._terminal)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._terminal,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._live = Live(get_renderable=self.view, console=self._terminal)

    def __enter__(self) -> RunDisplay:
        if self._done < self._steps:
            self._waiting.now(f"step {self._done + 1}, the first of this start")
        if self._terminal.is_terminal:
            self._live.start(refresh=True)  # a line printed while it starts would run into it
        return self

    def __exit__(self, *raised: object) -> None:
        self._waiting.over()
        self._live.stop()

    def view(self) -> Group:
        """Return the live view: the bar, the last step, the evaluations, and what is waited for."""
        told = [line for line in (self._facts, self._evaluated) if line]
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in told]
        return Group(self._bar, *lines, self._waiting.view)

    def say(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Show what is waited for inside the `with` block."""
        with self._waiting.on(what):
            if self._live.is_started:  # the wait may be over before the next drawing
                self._live.refresh()
            yield

    def evaluation(self, record: dict[str, Any], before: Best) -> None:
        """Show an evaluation's record in one line, with the best so far if that is another.

        before: the best of the earlier evaluations.
        """
        loss = _shown(record["eval_loss"])
        sets = record.get("eval_sets", {})
        parts = [f"{title} {_shown(one['loss'])}" for title, one in sets.items()]
        each = f"  ({', '.join(parts)})" if parts else ""
        line = f"evaluation after step {record['step']}: loss {loss}"
        if "eval_perplexity" in record:
            line += f"  perplexity {_shown(record['eval_perplexity'])}"
        if "eval_target_tokens" in record:
            line += f"  {record['eval_target_tokens']:,} tokens"
        best = before.after(record)
        known = best.step is not None
        at = f"{best.loss:.4f} after step {best.step}"
        so_far = ""
        if known and before.step is not None:
            so_far = f"  best {at}" if best.since else "  best so far"
        self._evaluated = f"eval loss {loss} after step {record['step']}"
        self._evaluated += f", best {at}" if known else ""
        self.say(f"{line}{each}{so_far}")

    def step(self, record: dict[str, Any]) -> None:
        """Show a training step's record."""
        if self._done == self._first_step:
            self._waiting.over()
        self._done = record["step"]
        self._facts = facts(record)
        self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        due = now - self._last_line >= QUIET_SECONDS or self._done == self._steps
        if not self._terminal.is_terminal and due:
            self._last_line = now
            rate = (now - self._started) / max(1, self._done - self._first_step)
            left = time.strftime("%H:%M:%S", time.gmtime(rate * (self._steps - self._done)))
            self.say(f"step {self._done}/{self._steps}  {self._facts}  {left} left")


def facts(record: dict[str, Any]) -> str:
    """Return a training step's record in one line."""
    norm = record["grad_norm"]
    return "  ".join(
        [
            f"loss {_shown(record['loss'])}",
            f"rate {record['learning_rate']:.2e}",
            f"gradient norm {'not finite' if norm is None else f'{norm:.3g}'}",
            f"epoch {record['epoch']:.2f}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
        ]
    )


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
