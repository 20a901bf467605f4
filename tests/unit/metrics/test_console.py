"""What a person sees of a run: on a terminal, and in a log."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from uspft.launcher import terminal as room
from uspft.launcher.terminal import Waiting
from uspft.metrics import Best, RunDisplay


def terminal(*, live: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    seen = io.StringIO()
    shown = Console(
        file=seen, force_terminal=live, width=width, height=25, highlight=False, soft_wrap=True
    )
    return shown, seen


def step(number: int, **more: Any) -> dict[str, Any]:
    record = {"step": number, "loss": 2.5, "learning_rate": 1.234e-5, "grad_norm": 0.98765}
    return {**record, "epoch": 0.126, "tokens_per_second": 12345.6, **more}


def evaluation(number: int, loss: float | None) -> dict[str, Any]:
    record = {"step": number, "eval_loss": loss, "eval_perplexity": 7.0}
    return record | {"eval_target_tokens": 1_000}


FACTS = "loss 2.5000  rate 1.23e-05  gradient norm 0.988  epoch 0.13  12,346 tokens/s"


def test_a_log_gets_plain_lines() -> None:
    shown, seen = terminal(live=False)
    with RunDisplay(2, 0, is_main=True, terminal=shown) as display:
        with display.waits("the checkpoint of step 1 to be saved"):
            pass
        display.step(step(1))
        display.step(step(2, grad_norm=None))
    first, last = seen.getvalue().splitlines()
    assert first == f"step 1/2  {FACTS}  {first[-13:]}"
    assert "gradient norm not finite" in last and re.fullmatch(r".*00:00:00 left", last)
    assert "\x1b" not in seen.getvalue()


def test_a_terminal_of_80_columns_shows_the_bar_the_step_and_what_is_waited_for() -> None:
    shown, seen = terminal(live=True)

    def view() -> list[str]:
        """The view as it is drawn now."""
        paper, drawn = terminal(live=False)
        paper.print(display.view())
        return drawn.getvalue().splitlines()

    with RunDisplay(150, 0, is_main=True, terminal=shown) as display:
        bar, waits = view()
        assert bar.startswith("step   0/150 ") and "waiting: step 1, the first" in waits
        display.step(step(1))
        bar, facts = view()
        assert bar.startswith("step   1/150 ") and bar.endswith("left") and facts == FACTS
        display.evaluation(evaluation(1, 2.0), Best())
        display.evaluation(evaluation(2, 2.5), Best.of([evaluation(1, 2.0)]))
        with display.waits("the checkpoint of step 2 to be saved"):
            drawn = view()
        assert drawn[1:3] == [FACTS, "eval loss 2.5000 after step 2, best 2.0000 after step 1"]
        assert "waiting: the checkpoint of step 2 to be saved 0:00:00" in drawn[3]
        assert len(view()) == 3 and max(map(len, [*drawn, facts])) <= 80
    assert seen.getvalue().endswith("\x1b[?25h"), "the cursor is as it was"


def test_the_best_evaluation_is_told_with_its_step() -> None:
    shown, seen = terminal(live=False)
    with RunDisplay(9, 3, is_main=True, terminal=shown) as display:
        best = Best.of([evaluation(1, None), evaluation(2, 2.25)])
        for number, loss in ((4, 2.5), (5, None), (6, 2.0), (7, 2.0)):
            display.evaluation(evaluation(number, loss), best)
            best = best.after(evaluation(number, loss))
    ends = [line.partition("tokens")[2].strip() for line in seen.getvalue().splitlines()]
    before = "best 2.2500 after step 2"
    assert ends == [before, before, "best so far", "best 2.0000 after step 6"]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with RunDisplay(2, 0, is_main=False) as display, display.waits("something"):
        display.step(step(1))
        display.evaluation(evaluation(1, 2.0), Best())
    assert capsys.readouterr().out == ""


def test_a_log_is_told_of_a_long_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TOLD_SECONDS", 0.05)
    shown, seen = terminal(live=False)
    waits = Waiting(shown)
    waits.now("the start of 4 processes")
    with waits.on("a save"):
        pass
    waits.over()
    time.sleep(0.1)
    assert seen.getvalue() == "", "all were short"
    with waits.on("an export"):
        time.sleep(0.2)
    waits.close()
    assert seen.getvalue().startswith("waiting: an export, ")
    assert len(seen.getvalue().splitlines()) == 1


def test_a_rank_s_wait_is_seen_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, seen = terminal(live=True)
    monkeypatch.setattr(room, "Console", lambda **_: shown)
    waits = Waiting.of_rank({"RANK": "0"})
    waits.now("the start of 4 processes")
    assert "waiting: the start of 4 processes" in seen.getvalue()
    waits.now("the model to be built")
    waits.close()
    assert "waiting: the model to be built" in seen.getvalue()
    assert "\x1b[?25h" in seen.getvalue().rpartition("\x1b[?25l")[2], "the cursor is back"
