"""What tests/faults has found of runs that were killed, cut off or cut short, for the page on long
runs."""

from __future__ import annotations

from typing import Any

from benchmarks.lab.results import ROOT
from benchmarks.lab.tables import markdown

FOLDER = ROOT / "tests" / "faults"
"""Where the files are."""


def kills(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of kills.json, by name, as Markdown: trials by moment and layout, and
    how many of them ended as an undisturbed run."""
    trials = result["trials"]
    layouts = list(dict.fromkeys(one["layout"] for one in trials))
    rows = []
    for moment in dict.fromkeys(one["moment"] for one in trials):
        cells = [moment]
        for layout in layouts:
            here = [one for one in trials if (one["moment"], one["layout"]) == (moment, layout)]
            good = sum(not one["wrong"] for one in here)
            cells.append(f"{good} of {len(here)}" if here else "–")
        rows.append(cells)
    return {"trials": markdown(("killed in", *layouts), rows)}


def cut_off(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of cut_off.json: what became of runs of two hosts, one cut off."""
    heads = ("the run", "cut off after step", "all ended after s", "as it should be")
    rows = [
        [
            one["case"],
            str(one["after_step"]),
            f"{one['ended_after_seconds']:.0f}",
            "; ".join(one["wrong"]) or "yes",
        ]
        for one in result["cases"]
    ]
    return {"cases": markdown(heads, rows)}


def held(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of held.json: how many cases of each test passed."""
    rows = [
        [f"`{test}`", f"{one['passed']} of {one['cases']}"] for test, one in result["tests"].items()
    ]
    return {"tests": markdown(("test", "cases passed"), rows)}
