"""Runs of the data benchmark → what data.json holds, and its table."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.data.case import Case, Measured

OURS, THEIRS = "uspft preprocess", "datasets.map"
ENOUGH = 0.9
"""Tokens a second of ours, of theirs, that preprocess promises."""


def record(found: list[Measured], case: Case, processes: int) -> dict[str, Any]:
    """This returns what data.json holds of a case."""
    ours, theirs = ([run for run in found if run.side == side] for side in (OURS, THEIRS))
    mine, other = (median(run.rate for run in side) for side in (ours, theirs))
    whole = [median(run.command_seconds for run in side) for side in (ours, theirs)]
    return {
        "conversations": case.conversations,
        "most_turns": case.turns,
        "bytes": case.data.stat().st_size,
        "processes": processes,
        "tokens": found[0].tokens,
        "same_tokens": len({run.digest for run in found}) == 1,
        "tokens_per_second": {OURS: mine, THEIRS: other},
        "command_seconds": {OURS: whole[0], THEIRS: whole[1]},
        "ratio": mine / other,
        "runs": [asdict(run) for run in found],
    }


def table(cases: dict[str, dict[str, Any]]) -> str:
    """This lays out the cases of data.json as Markdown."""
    lines = [
        "| file, template | `preprocess` tokens/s | `datasets.map` tokens/s | ratio | commands s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, case in cases.items():
        rates, whole = case["tokens_per_second"], case["command_seconds"]
        cells = [
            name,
            f"{rates[OURS]:,.0f}",
            f"{rates[THEIRS]:,.0f}",
            f"{case['ratio']:.2f}",
            f"{whole[OURS]:.1f} / {whole[THEIRS]:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
