"""The counts of tests/faults/kills.json, for the page on long runs."""

from __future__ import annotations

from typing import Any

from benchmarks.lab.results import ROOT
from benchmarks.lab.tables import markdown

FOLDER = ROOT / "tests" / "faults"
"""Where the trials' file is."""


def figures(result: dict[str, Any]) -> dict[str, str]:
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
