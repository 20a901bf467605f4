"""The benchmark of tokenising: its conversations, and what is made of its runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.data import figures
from benchmarks.data.case import Case, Measured


def test_the_rates_of_tokenising(tmp_path: Path) -> None:
    case = Case(5, 2, "jsonl", "unmarked", tmp_path)
    case.make()
    lines = [json.loads(line) for line in case.data.read_text().splitlines()]
    assert len(lines) == 5 and {len(line["messages"]) for line in lines} == {2, 4}
    assert "generation" not in case.jinja.read_text().replace("add_generation_prompt", "")
    runs = [
        Measured(side, seconds, 9.0, 100, digest)
        for side, seconds, digest in (
            (figures.OURS, 1.0, "a"),
            (figures.THEIRS, 2.0, "a"),
            (figures.OURS, 4.0, "a"),
            (figures.THEIRS, 2.0, "b"),
        )
    ]
    found = figures.record(runs, case, 2)
    assert found["tokens_per_second"] == {figures.OURS: 62.5, figures.THEIRS: 50.0}
    assert found["ratio"] == 1.25 and not found["same_tokens"]
    assert figures.record(runs[:3], case, 2)["same_tokens"]
    (line,) = figures.table({"jsonl, unmarked": found}).splitlines()[2:]
    assert line == "| jsonl, unmarked | 2 | 62 | 50 | 1.25 | 0.50 to 2.00 | 9.0 / 9.0 |"
