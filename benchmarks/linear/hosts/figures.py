"""Seconds of heads and of states between hosts → the table, and where they cross."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown, span

MIB = 1 << 20


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each length: MiB of the busiest rank, medians, and the least and most."""
    heads = [
        "tokens",
        "MiB by heads",
        "by states",
        "seconds by heads",
        "",
        "by states",
        "",
        "ratio",
    ]
    rows = []
    for one in cases:
        ways = one["seconds"].values()
        a, b = (median(each) for each in ways)
        sent = [f"{each / MIB:.2f}" for each in one["sent"].values()]
        timed = [cell for each in ways for cell in (f"{median(each):.2f}", span(each))]
        rows.append([f"{one['tokens']:,}", *sent, *timed, f"{a / b:.2f}"])
    return markdown(heads, rows)


def verdict(cases: Sequence[dict[str, Any]]) -> str:
    """Return where bytes and where seconds cross, as a sentence."""
    by_bytes = [one["tokens"] for one in cases if one["sent"]["states"] < one["sent"]["heads"]]
    by_clock = [
        one["tokens"]
        for one in cases
        if median(one["seconds"]["states"]) < median(one["seconds"]["heads"])
    ]
    said = [f"{min(found):,} tokens on" if found else "no length" for found in (by_bytes, by_clock)]
    return f"States send less from {said[0]}, and take less time from {said[1]}."


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of linear-hosts.json, by name, as Markdown."""
    if not result:
        return {"table": "Not measured yet.", "verdict": "", "measured": ""}
    how = (
        f"{result['hosts']} hosts of one process, {result['mbit']} Mbit/s; "
        f"medians of {result['rounds']} rounds in turn."
    )
    return {
        "table": table(result["cases"]),
        "verdict": verdict(result["cases"]),
        "measured": f"[linear-hosts.json](linear-hosts.json): {measured_on([result])} {how}",
    }
