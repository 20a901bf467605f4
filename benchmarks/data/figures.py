"""Runs of the data benchmark → what data.json holds, and its table."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.data.case import Case, Measured
from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown, span

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
    heads = ["file, template", "runs of each", "`preprocess` tokens/s"]
    heads += ["`datasets.map` tokens/s", "ratio", "ratios of the rounds", "commands s"]
    lines = []
    for name, case in cases.items():
        rates, whole = case["tokens_per_second"], case["command_seconds"]
        runs = [Measured(**each) for each in case["runs"]]
        ours, theirs = ([run.rate for run in runs if run.side == side] for side in (OURS, THEIRS))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        lines.append(
            [
                name,
                str(len(ratios)),
                f"{rates[OURS]:,.0f}",
                f"{rates[THEIRS]:,.0f}",
                f"{case['ratio']:.2f}",
                span(ratios),
                f"{whole[OURS]:.1f} / {whole[THEIRS]:.1f}",
            ]
        )
    return markdown(heads, lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of data.json, by name, as Markdown."""
    return {"rates": table(result["cases"]), "measured": measured_on([result])}
