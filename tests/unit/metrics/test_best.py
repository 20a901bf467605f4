"""The best evaluation of a run, and how many have come since."""

from __future__ import annotations

from pathlib import Path

from uspft.metrics import Best, Journal


def test_the_earliest_least_loss_is_the_best(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    assert Best.of(journal.evaluations()) == Best(None, float("inf"), 0)
    seen = []
    for step, loss in ((1, None), (2, 3.0), (3, 2.5), (4, 2.5), (5, None), (6, 2.4)):
        journal.write({"step": step, "loss": 0.1})
        journal.write({"step": step, "eval_loss": loss})
        best = Best.of(journal.evaluations())
        seen.append((best.step, best.since))
    assert seen == [(None, 1), (2, 0), (3, 0), (3, 1), (3, 2), (6, 0)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "eval_lo')  # killed while it wrote
    assert Best.of(journal.evaluations()) == Best(6, 2.4, 0)
