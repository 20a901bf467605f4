"""Tables of what layers with a state send, of their errors and of their seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import as_tokens, markdown

MIB = 1 << 20
SHOWN = "Qwen3.5-9B"


def sent(cases: Sequence[dict[str, Any]], model: str = SHOWN) -> str:
    """Return a line for each length and number of ranks, in MiB of the busiest rank."""
    heads = ["tokens", "ranks", "heads", "states, one span", "two spans", "packed", "gather"]
    rows = []
    for one in cases:
        if one["model"] != model:
            continue
        ways = [one["heads"], *one["states"].values(), one["gather"]]
        cells = [f"{each / MIB:,.1f}" for each in ways]
        rows.append([as_tokens(one["tokens"]), str(one["ranks"]), *cells])
    return markdown(heads, rows)


def errors(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each gate: root mean squares of errors, and the largest in parentheses."""
    names = [name for name in cases[0] if name != "gate"]
    rows = [[one["gate"], *(f"{one[n][1]:.1e} ({one[n][0]:.1e})" for n in names)] for one in cases]
    heads = [n if n == "one process" else f"in parts, summaries in {n}" for n in names]
    return markdown(["decay", *heads], rows)


def seconds(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each length."""
    names = [name for name in cases[0] if name != "tokens"]
    rows = [[as_tokens(one["tokens"]), *(f"{one[n]:.2f}" for n in names)] for one in cases]
    return markdown(["tokens", *names], rows)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of linear.json, by name, as Markdown."""
    if not result:
        return {"sent": "Not measured yet."} | dict.fromkeys(
            ("errors", "seconds", "row", "measured"), ""
        )
    return {
        "sent": sent(result["sent"]),
        "errors": errors(result["errors"]),
        "seconds": seconds(result["seconds"]),
        "row": (
            f"A row of {as_tokens(result['tokens'])} tokens in {result['parts']} processes, each "
            "with a part, beside a token at a time in float64: root mean squares of errors, and "
            "the largest in parentheses."
        ),
        "measured": f"[linear.json](linear.json): {measured_on([result])} "
        f"Medians of {result['runs']} runs.",
    }
